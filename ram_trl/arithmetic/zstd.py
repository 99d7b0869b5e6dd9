"""Zstandard frames, compressed and decompressed with one context a thread."""

import threading

import zstandard

from ..errors import CorruptedFileError


__all__ = ["compress", "decompress"]

# Differences hardly repeat: nearly all of the gain is that of entropy coding. A search for repetitions that finds few
# makes both directions twice as fast as level 1, and the result no larger.
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=18, hash_log=6, chain_log=6, search_log=1, min_match=7, strategy=zstandard.STRATEGY_FAST
)


class _Contexts(threading.local):
    def __init__(self):
        self.compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def compress(data) -> bytes:
    """One frame with its content size, of anything with the buffer protocol."""
    return _contexts.compressor.compress(data)


def decompress(frame, limit: int) -> bytes:
    """Content of one frame.

    Raises:
        CorruptedFileError: if it is none, or claims more than `limit` bytes.
    """
    try:
        size = zstandard.get_frame_parameters(frame).content_size
        if size > limit:
            raise CorruptedFileError(f"a frame claims {size} bytes, at most {limit} are possible")
        return _contexts.decompressor.decompress(frame, max_output_size=limit)
    except zstandard.ZstdError as error:
        raise CorruptedFileError(f"a frame does not decompress: {error}") from error
