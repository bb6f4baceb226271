"""Run the Python code of README.md, and write what it prints below it: ``python docs/readme.py FOLDER``.

FOLDER has the files that the code reads, and takes those that it writes. Output of the fine-tuning's and the
allocation's progress is not shown.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.compile(r"^```python\n(?P<code>.*?)^```\n+```text\n(?P<output>.*?)^```$", re.M | re.S)


def main(folder: str) -> None:
    """Run the code and replace the output in README.md."""
    text = README.read_text()
    found = BLOCKS.search(text)
    assert found is not None, "README.md has no Python block with output below it."
    command = [sys.executable, "-c", found["code"]]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    begin, end = found.span("output")
    README.write_text(text[:begin] + done.stdout.strip() + "\n" + text[end:])


if __name__ == "__main__":
    main(*sys.argv[1:])
