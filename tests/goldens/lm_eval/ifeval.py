"""Writes ifeval.json: what lm-eval 0.4.13 says of made-up answers to every prompt of IFEval.

    pip install --no-deps --target FOLDER lm-eval==0.4.13 nltk immutabledict
    python -m nltk.downloader punkt_tab
    python tests/goldens/lm_eval/ifeval.py --source FOLDER --data FOLDER_WITH_ALL_DATA_SETS

Stored are the verdicts alone, one sign for each answer. Left out is letter_frequency of signs that are no letters, for
which lm-eval draws a random letter.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

FILE = Path(__file__).with_suffix(".json")
ANSWERS = 8  # for each prompt
SENTENCES = (
    "The old bridge was closed last winter, and nobody knows why.",
    "I would like to visit the museum with my friends tomorrow!",
    "Can you tell me where the station is",
    "Das Wetter ist heute sehr sch\u00f6n, und wir gehen in den Garten.",
    "Le petit chat dort sur la table pendant que je travaille.",
    "\u092f\u0939 \u0915\u093f\u0924\u093e\u092c \u092c\u0939\u0941\u0924 \u0905\u091a\u094d\u091b\u0940 "
    "\u0939\u0948 \u0914\u0930 \u092e\u0941\u091d\u0947 \u092a\u0938\u0902\u0926 \u0939\u0948\u0964",
    "\u0421\u0435\u0433\u043e\u0434\u043d\u044f \u043c\u044b \u0438\u0434\u0451\u043c \u0432 \u0442\u0435"
    "\u0430\u0442\u0440 \u0441 \u0434\u0440\u0443\u0437\u044c\u044f\u043c\u0438.",
    "12 + 30 = 42",
    "* one\n* two\n - three\n** four",
    "*bold* and **bolder** and ** ** and *open",
    "<<A title>>",
    "<< >> <<>>",
    "[name] lives in [place] []",
    "P.S. I forgot the milk",
    "p. p. s so did you",
    "PPS nothing",
    "***",
    "******",
    "\n\n",
    "My answer is yes.",
    "my answer is maybe",
    "SECTION 1\nfirst\nSection 2 second PARAGRAPH3 Day 4 Audience 5",
    "QUITE LOUD WORDS",
    "DON'T panic: NASA's well-known U.S. plan, I'M told, is OK",
    'Dr. Ann E. Smith paid 3.50 dollars at 5 p.m. in St. Louis... "Really?!" she asked. Yes (vs. no).',
    "*\nnot a point\n*\n* a point\n-\n\n  - another",
    "",
)


def asked_for(kind: str, given: Mapping[str, Any], rng: random.Random) -> str:
    """Something that goes some way to follow the instruction; counts are met or missed by one."""
    count = next((value for value in given.values() if isinstance(value, int)), 2) + rng.choice((0, 0, 0, -1, 1))
    name = kind.partition(":")[2]
    if name in ("existence", "forbidden_words"):
        return " ".join(given.get("keywords") or given["forbidden_words"])
    made = {
        "frequency": f"{given.get('keyword')} " * count,
        "number_sentences": "It was so. " * count,
        "capital_word_frequency": "LOUD " * count,
        "letter_frequency": str(given.get("letter")) * count,
        "number_words": "word " * count,
        "number_paragraphs": "\n***\n".join(["a part"] * count),
        "nth_paragraph_first_word": "\n\n".join([f"'{given.get('first_word')}', so it is"] * count),
        "number_placeholders": "[x]" * count,
        "postscript": f"\n{given.get('postscript_marker')} and more",
        "number_bullet_lists": "\n".join(["* point"] * count),
        "number_highlighted_sections": "*part* " * count,
        "multiple_sections": " ".join(f"{given.get('section_spliter')} {index}" for index in range(count)),
        "json_format": rng.choice(('```json\n{"a": [1, 2]}\n```', "{'a': 1}", "[]", "```\n1\n```")),
        "two_responses": rng.choice(("one******two", "one******one", "******one******two\n******", "a****** ******b")),
    }
    return made.get(name, "")


def answers(row: Mapping[str, Any]) -> list[str]:
    """Made-up answers to the prompt; the same on every machine."""
    rng = random.Random(f"ifeval/{row['key']}")
    found: list[str] = []
    for _ in range(ANSWERS):
        pairs = list(zip(row["instruction_id_list"], row["kwargs"], strict=True))
        parts = [asked_for(kind, given, rng) for kind, given in pairs if rng.random() < 0.7]
        parts += rng.sample(SENTENCES, rng.choice((0, 0, 1, 2, 4)))
        text = rng.choice((" ", "\n", "\n\n")).join(parts)
        wishes = {name: value for _, given in pairs for name, value in given.items()}
        if rng.random() < 0.6:
            text = f"{wishes.get('prompt_to_repeat', '')}{text}{wishes.get('end_phrase', '')}"
        dressed = (text, text, text.upper(), text.lower(), f' "{text}" ', text.replace(",", ""), f'{text}"')
        found.append(rng.choice(dressed))
    return found


def covered(row: Mapping[str, Any]) -> list[int]:
    """Which of its instructions are compared."""
    pairs = enumerate(zip(row["instruction_id_list"], row["kwargs"], strict=True))
    return [at for at, (kind, given) in pairs if given.get("letter", "a").isalpha()]


def read(data: Path) -> list[dict[str, Any]]:
    """The rows of the data set."""
    return [json.loads(line) for line in (data / "ifeval" / "input_data.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--source", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    options = parser.parse_args()
    sys.path.insert(0, str(options.source))
    langdetect = importlib.import_module("langdetect")

    langdetect.DetectorFactory.seed = 0
    for package in ("lm_eval", "lm_eval.tasks"):  # without what they import
        stand_in = sys.modules[package] = ModuleType(package)
        stand_in.__path__ = [str(options.source.joinpath(*package.split(".")))]
    utils = importlib.import_module("lm_eval.tasks.ifeval.utils")
    verdicts: dict[str, list[str]] = {}
    for row in read(options.data):
        kept = covered(row)
        kinds, kwargs = [row["instruction_id_list"][at] for at in kept], [row["kwargs"][at] for at in kept]
        given = SimpleNamespace(instruction_id_list=kinds, kwargs=kwargs, prompt=row["prompt"], key=row["key"])
        said = [utils.test_instruction_following_strict(given, text).follow_instruction_list for text in answers(row)]
        verdicts[str(row["key"])] = ["".join("01"[one[at]] for one in said) for at in range(len(kept))]
    FILE.write_text(json.dumps({"peer": "lm-eval", "version": "0.4.13", "verdicts": verdicts}) + "\n")


if __name__ == "__main__":
    main()
