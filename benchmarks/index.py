"""How fast the search tool finds passages, on one core, and how many of those that are needed: the real questions.

    python benchmarks/index.py

Reads search_qa in $MTGRPO_DATA. Prints one JSON line; nothing is compared, so nothing is kept.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

from mtgrpo.tasks.published import data_folder
from mtgrpo.tools.bm25s import BM25S

K = 10  # passages for each query


def main() -> None:
    """Build, open, ask every question once, and print."""
    folder = data_folder()
    if folder is None:
        raise SystemExit("set MTGRPO_DATA to the folder of all data sets")
    rows = [json.loads(line) for line in (folder / "search_qa" / "questions.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["gold"]]
    corpus = folder / "search_qa" / "passages.jsonl"
    with tempfile.TemporaryDirectory() as place:
        seconds = [time.perf_counter()]
        for _ in range(2):
            index = BM25S(corpus, Path(place) / "index")
            seconds.append(time.perf_counter())
        recall: dict[str, list[float]] = {}
        for row in rows:
            found = {passage.id for passage in index.search(row["question"], K)}
            recall.setdefault(row["source"], []).append(sum(gold in found for gold in row["gold"]) / len(row["gold"]))
        seconds.append(time.perf_counter())
    line = {
        "passages": len(index),
        "queries": len(rows),
        "build_s": round(seconds[1] - seconds[0], 2),
        "open_s": round(seconds[2] - seconds[1], 3),
        "queries_per_s": round(len(rows) / (seconds[3] - seconds[2])),
        f"recall@{K}": {source: round(sum(values) / len(values), 4) for source, values in sorted(recall.items())},
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
