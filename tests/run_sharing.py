"""Runs `ram-trl` again and again in one process, whose environment says where the Hub and S3 are (test_sharing.py).

Reads a line of JSON for each call from stdin, the words of the command line; answers with a line of JSON.
"""

import contextlib
import io
import json
import logging
import os
import sys

from ram_trl.cli import main


def call(words):
    code, out, err = 0, io.StringIO(), io.StringIO()
    # what is logged goes where stderr was when it was set up
    logging.getLogger().handlers.clear()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as stop:
            code = stop.code
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


if __name__ == "__main__":
    # what the libraries print belongs to nobody
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        os.environ.update(request["environment"])
        answers.write(json.dumps(call(request["words"])) + "\n")
        answers.flush()
