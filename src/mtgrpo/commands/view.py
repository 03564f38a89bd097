"""`mtgrpo view RUN [RUN ...]`: a page on which runs are looked at down to the single token, live ones too."""

import asyncio
import ipaddress
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mtgrpo.errors import Arguments, ConfigError
from mtgrpo.record.reading import find_runs
from mtgrpo.runtime.text import printable
from mtgrpo.viewer.resources import Runs
from mtgrpo.viewer.server import serve, write_out


def main(arguments: Sequence[str]) -> int:
    """Serve the page until Ctrl-C, or write it as files. Raises ConfigError."""
    parser = Arguments("mtgrpo view", description=__doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of runs or sweeps (the newest)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write the page as files, for any web server")
    parser.add_argument("--host", default="127.0.0.1", help="another address of this machine, which asks for a secret")
    parser.add_argument("--at", default="", metavar="PLACE", help="of the first run, as notes and `mtgrpo show` say")
    parser.add_argument("--port", type=int, default=0, help="default: the first free one from 8765")
    args = parser.parse_args(arguments)
    runs = Runs(find_runs(args.runs))
    if args.out is not None:
        return _write(runs, args.out)
    _check_address(args.host, args.port)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(runs, args.host, args.port, f"/r/0/{args.at}" if args.at else ""))
    return 0


def _write(runs: Runs, folder: Path) -> int:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {folder} is there already; choose a folder that is new or empty")
    try:
        count = write_out(runs, folder)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}; choose another place with --out") from error
    print(f"{count} files are in {printable(str(folder))}: python -m http.server -d {printable(str(folder))}")
    return 0


def _check_address(host: str, port: int) -> None:
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port must be a number up to 65535, got {port}")
    try:
        everywhere = ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        everywhere = not host
    if everywhere:
        raise ConfigError(f"--host {host} stands for every address: name the one under which the page is to be opened")
