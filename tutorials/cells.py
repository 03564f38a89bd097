"""What a tutorial does beside Python: types a command, writes a file. In its notebook: `!` and `%%writefile`."""

import subprocess
from pathlib import Path


def sh(line: str) -> None:
    """Type a command, and stop where it fails."""
    print("$", line, flush=True)
    subprocess.run(line, shell=True, check=True)


def file(name: str, text: str) -> None:
    """Write a file of your own."""
    Path(name).write_text(text.lstrip("\n"))
