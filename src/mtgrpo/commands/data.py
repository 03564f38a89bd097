"""`mtgrpo data`: get data sets, Wikipedia's index and a real model, check files, build indexes and Parquet files."""

import argparse
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mtgrpo.chat import ChatSettings, open_chat
from mtgrpo.config.options import options
from mtgrpo.errors import Arguments, ConfigError
from mtgrpo.messages import spoken
from mtgrpo.model import smollm2
from mtgrpo.model.tokenizer import load_tokenizer
from mtgrpo.runtime.hub import refuse_unloadable
from mtgrpo.runtime.text import printable, shorten
from mtgrpo.tasks import Split
from mtgrpo.tasks.conversations import Conversations
from mtgrpo.tasks.jsonl import Jsonl, RowFaults, each_tried
from mtgrpo.tasks.parquet import Parquet, write_parquet
from mtgrpo.tasks.published import Published, data_folder
from mtgrpo.tasks.rows import Columns, Row, Rows, cell
from mtgrpo.tools.bm25s import BM25S
from mtgrpo.tools.search import Passage, passage_from
from mtgrpo.types import Task

WIKIPEDIA = "PeterJinGo/wiki-18-bm25-index"  # 21 million paragraphs of 2018, those of Search-R1 (arXiv:2503.09516)
_COLUMNS = ("prompt", "messages", "answer", "id")
_TASKS, _CONVERSATIONS, _PASSAGES = "tasks", "conversations", "passages"  # what the rows of a file are


def main(arguments: Sequence[str]) -> int:
    """Do what the words say. Returns the exit code: 1 where a file that was checked has rows that cannot be used."""
    parser = Arguments("mtgrpo data", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    model = commands.add_parser("smollm2", help="get the model: it goes to MTGRPO_MODELS, by default ~/.cache/mtgrpo")
    model.add_argument("--dry-run", action="store_true", help="say where it goes, get nothing")
    check = commands.add_parser("check", help="say what is in a file, how it begins and which rows cannot be used")
    check.add_argument("file", type=Path, help="a .jsonl or .parquet file")
    kinds = (_TASKS, _CONVERSATIONS, _PASSAGES)
    check.add_argument("--kind", choices=kinds, help="of its rows; by default as the first has it")
    check.add_argument("--rows", type=int, default=2, metavar="N", help="how many to show (2)")
    check.add_argument("--model", default="", metavar="NAME", help="show them in the chat template of this model")
    for name in _COLUMNS:
        check.add_argument(f"--{name}", default=getattr(Columns, name), help=f"as task.columns.{name}")
    commands.add_parser("wikipedia", help="get the search index of Wikipedia from the hub, or say where one belongs")
    build = commands.add_parser("build", help="the search index of a .jsonl corpus, or a Parquet file of .jsonl rows")
    build.add_argument("file", type=Path, help="a .jsonl file")
    build.add_argument("--out", type=Path, help="FILE.parquet, or an index's folder, by default in ~/.cache/mtgrpo")
    for name, kind in options("task").items():
        if issubclass(kind, Published) and name != "hub":
            also = ["svamp"] if name == "word_problems" else []
            text = f"get the data set of task={name} from the hub, or say where a copy of it belongs"
            commands.add_parser(name, aliases=also, help=text).set_defaults(source=kind)
    args = parser.parse_args(arguments)
    if args.what == "smollm2":
        goes = f"goes to {smollm2.folder()}" if args.dry_run else f"is in {smollm2.fetch()}"
        print(f"model.name=smollm2 {goes}")
        return 0
    if args.what == "wikipedia":
        print(f"environment.tools={{search: {{backend: lucene, index: {_fetch_wikipedia()}}}}}")
        return 0
    if "source" in args:
        for file, count in _rows_by_file(args.source()).items():
            print(f"{file}: {count:,} rows")
        return 0
    if not args.file.is_file():
        raise ConfigError(f"there is no file {args.file}")
    return _check(args) if args.what == "check" else _build(args.file, args.out)


def _fetch_wikipedia() -> Path:
    """The folder of the index, which is brought here where it is not. Raises ConfigError where it cannot be."""
    if (data := data_folder()) is None:
        raise ConfigError("set MTGRPO_DATA to the folder of all data sets: the index goes to wikipedia/bm25 in it")
    folder = data / "wikipedia" / "bm25"
    if not folder.is_dir():
        how = f"put an index of Lucene that keeps its texts (-storeRaw), such as pyserini's of Wikipedia, into {folder}"
        with refuse_unloadable(f"the index {WIKIPEDIA}", WIKIPEDIA, how, "datasets/"):
            from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415  it takes a second

            partial, only = folder.with_name("partial"), ["bm25/*"]
            version = HfApi().dataset_info(WIKIPEDIA).sha  # without the hub what is here would pass for the whole
            snapshot_download(WIKIPEDIA, repo_type="dataset", revision=version, allow_patterns=only, local_dir=partial)
            (partial / folder.name).rename(folder)
    return folder


def _rows_by_file(source: Published) -> Mapping[str, int]:
    """How many rows it has in each file, or split on the hub, from which they are brought here."""
    found: dict[str, int] = {}
    for rows in map(source.rows, Split):
        found |= Counter(rows.place(index)[0] for index in range(len(rows)))
    return found


def _build(file: Path, out: Path | None) -> int:
    if out and out.suffix == ".parquet":
        print(f"{out}: {write_parquet(file, out):,} rows")
    else:
        index = BM25S(file, out)
        print(f"{index.folder}: the index of {len(index):,} passages; it is found again by the corpus")
    return 0


def _check(args: argparse.Namespace) -> int:
    columns = Columns(**{name: getattr(args, name) for name in _COLUMNS})
    parquet = args.file.suffix == ".parquet"
    source = Parquet(columns=columns) if parquet else Jsonl(columns=columns)
    rows = source.rows({args.file: args.file.stem})
    if not len(rows):
        raise ConfigError(f"{args.file} is empty")
    kind = args.kind or _kind(rows, columns)
    if kind == _CONVERSATIONS:
        source = Conversations(columns=columns)
    show = _shown_by(args.model)
    faults, shown = RowFaults(rows, columns.answer), 0
    passages = each_tried(rows, lambda number, row: passage_from(row, rows.where(number)))
    for number, row in enumerate(passages if kind == _PASSAGES else source.tried(rows)):
        if faults.add(number, row) and not isinstance(row, ConfigError) and shown < args.rows:
            shown += 1
            print(f"--- {rows.where(number)}\n{show(row)}")
    print("".join(f"{note}\n" for note in rows.notes()), end="")
    if kind == _TASKS and faults.unanswered:
        print(f"no row has an answer in column {columns.answer!r}; name another with --answer")
    wrong = faults.others | faults.unusable
    print(f"{args.file}: {len(rows):,} rows of {kind}, {len(wrong):,} of which cannot be used")
    for line in faults.described(faults.lacking | wrong):
        print(printable(re.sub(r"task\.columns\.(\w+)=", r"--\1 ", line)))
    return int(bool(wrong))


def _kind(rows: Rows, columns: Columns) -> str:
    """What the first row is that can be read."""
    tried = each_tried(rows, lambda _, row: row)
    row: Row = next((row for row in tried if not isinstance(row, ConfigError)), {})
    if cell(row, columns.prompt) is not None:
        return _TASKS
    messages: Any = cell(row, columns.messages)
    if isinstance(messages, list) and messages:
        last: Any = messages[-1]
        return _CONVERSATIONS if isinstance(last, Mapping) and last.get("role") == "assistant" else _TASKS
    return _PASSAGES if "text" in row else _TASKS


def _shown_by(model: str) -> Callable[[Task | Passage], str]:
    """How a row is shown: by role, or in the text of a model's chat template."""
    chat = open_chat(load_tokenizer(model), ChatSettings()) if model else None

    def shown(row: Task | Passage) -> str:
        if isinstance(row, Passage):
            return shorten(printable(f"[{row.id}] {row.title}\n{row.text}"))
        prompt = chat.decode(chat.open(row.messages, ())) if chat else "\n".join(map(spoken, row.messages))
        said = (spoken(message) for message in Conversations().demonstration(row, 0)) if "said" in row.metadata else ()
        answers = row.metadata.get("answers", [row.answer]) if row.answer else []
        return shorten(printable("\n".join([prompt, *said, *(f"answer: {one}" for one in answers)])))

    return shown
