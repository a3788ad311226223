"""Runs a folder's unit tests and says what came of them, on standard output and, in one line, in a pipe.

    (from sandbox.py) REPORT_FD

Owns the form of the report: "ran failed", written once after the last test. It imports nothing of pearl. Invariant: times and
addresses do not appear, so that the same code gives the same text.
"""

from __future__ import annotations

import io
import os
import re
import sys
import unittest


def main(report: int) -> None:
    sys.argv = sys.argv[:1]
    stream = io.StringIO()
    suite = unittest.TestLoader().discover("tests")
    result = unittest.TextTestRunner(stream=stream, verbosity=1).run(suite)
    text = stream.getvalue().replace(os.getcwd() + os.sep, "")
    text = re.sub(r"^(Ran \d+ tests?) in .*$", r"\1", text, flags=re.MULTILINE)
    sys.stdout.write(re.sub(r"0x[0-9a-f]{6,}", "0x...", text))
    sys.stdout.flush()
    bad = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses) + len(result.skipped)
    os.write(report, f"{result.testsRun} {bad}\n".encode())
    os._exit(0 if result.wasSuccessful() else 1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
