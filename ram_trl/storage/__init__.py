"""Floor 1b: bytes on disk. Names, digests and durable writing; no arithmetic, no ranks, no trainers."""
