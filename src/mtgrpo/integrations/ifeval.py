"""IFEval: prompts whose instructions a program can check, and the checks of all 25 kinds."""

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from mtgrpo.errors import ConfigError, TaskError
from mtgrpo.parts import Folder
from mtgrpo.rewards import Reward, required
from mtgrpo.runtime.packages import refuse_without_package
from mtgrpo.tasks import Split, user
from mtgrpo.tasks.published import Published, text
from mtgrpo.tasks.rows import Row, Rows
from mtgrpo.types import Task, Trajectory

Check = (  # of a text, by 0 to 3 arguments of an instruction
    Callable[[str], bool]
    | Callable[[str, Any], bool]
    | Callable[[str, Any, Any], bool]
    | Callable[[str, Any, Any, Any], bool]
)
_HELD_OUT = 100  # prompts, of 541


@dataclass
class IFEvalTasks(Published):
    """541 prompts with 834 instructions of 25 kinds, graded by reward=ifeval (Zhou et al. 2023, arXiv:2311.07911).

    Read from `path`, else from ifeval/input_data.jsonl in $MTGRPO_DATA, else from google/IFEval on the Hugging Face
    hub. The data set is one for evaluation alone; here the 100 prompts whose key has the smallest SHA-256 are held out.
    """

    path: Folder = ""  # a .jsonl file with key, prompt, instruction_id_list and kwargs

    place = "ifeval"
    stem = "input_data"
    splits = ("train", "train")
    on_hub = ("google/IFEval", "")
    layout = "IFEval rows have key, prompt, instruction_id_list and as many kwargs"

    def chosen(self, rows: Rows, split: Split) -> Sequence[int]:
        """By the SHA-256 of the keys. Raises ConfigError where there are too few."""
        order = sorted(range(len(rows)), key=lambda index: _digest(rows, index))
        if len(rows) <= _HELD_OUT and split is Split.train:
            raise ConfigError(f"task.path={self.path}: {_HELD_OUT} prompts are held out, and it has only {len(rows)}")
        return sorted(order[:_HELD_OUT] if split is Split.eval else order[_HELD_OUT:])

    def task(self, row: Row, rows: Rows, index: int) -> Task:
        metadata = {"instruction_id_list": row["instruction_id_list"], "kwargs": row["kwargs"]}
        if not all(isinstance(one, list) for one in metadata.values()) or len({*map(len, metadata.values())}) > 1:
            raise ValueError("instruction_id_list and kwargs")
        return Task(f"ifeval/{row['key']}", user(text(row, "prompt")), "", metadata)


def _digest(rows: Rows, index: int) -> str:
    key = rows[index].get("key")
    if key is None:
        raise ConfigError(f"{rows.where(index)}: no column 'key', which says whether the prompt is held out")
    return hashlib.sha256(str(key).encode()).hexdigest()


class AccuracyLevel(Enum):
    """What is counted."""

    prompt = "prompt"  # 1 when all instructions are followed, else 0
    instruction = "instruction"  # the share of the instructions that are followed


@dataclass
class IFEval(Reward):
    """Whether the final message follows all instructions of its prompt, or which share it follows.

    The instructions stand in the task's metadata, as task=ifeval has them: `instruction_id_list` and, in the same
    order, their `kwargs`. This is the strict accuracy of Zhou et al. 2023 (arXiv:2311.07911): the message counts as it
    stands, and an empty one follows nothing. Sentences are told apart by NLTK's model where its data are installed
    (`python -m nltk.downloader punkt_tab`), else by a rule, which a note says.
    """

    level: AccuracyLevel = AccuracyLevel.prompt

    def __post_init__(self) -> None:
        super().__post_init__()
        for package in ("langdetect", "nltk"):
            refuse_without_package(package, "reward=ifeval")

    def reward(self, trajectory: Trajectory) -> float:
        """From 0.0 to 1.0. Raises TaskError when the task has no instructions, or some of an unknown kind."""
        kept = followed(trajectory.task, trajectory.final)
        return float(all(kept)) if self.level is AccuracyLevel.prompt else sum(kept) / len(kept)

    def note(self, divide_by_std: bool) -> str:
        """That sentences are told apart by a rule, where that is so."""
        if _punkt() is not None:
            return ""
        return (
            "reward=ifeval: without NLTK's model of sentences a rule tells them apart, which gave another verdict for "
            "1 of 416 answers to the 52 instructions that count sentences; python -m nltk.downloader punkt_tab"
        )


def followed(task: Task, text: str) -> list[bool]:
    """Which of the task's instructions `text` follows. Raises TaskError as `IFEval.reward` does."""
    kinds, arguments = (required(task, name, "ifeval", "ifeval") for name in ("instruction_id_list", "kwargs"))
    if len(kinds) != len(arguments):
        raise TaskError(f"task {task.id} has {len(kinds)} instructions and {len(arguments)} kwargs; give one each")
    return [_follows(task, text, kind, given) for kind, given in zip(kinds, arguments, strict=True)]


def _follows(task: Task, text: str, kind: str, arguments: Mapping[str, Any]) -> bool:
    if kind not in KINDS:
        raise TaskError(f"task {task.id}: the instruction {kind!r} is unknown; known: {', '.join(sorted(KINDS))}")
    check = KINDS[kind]
    given = {name: value for name, value in arguments.items() if value is not None}  # tables fill up with null
    try:
        bound = inspect.signature(check).bind(text, **given)
        return bool(text.strip()) and check(*bound.args)
    except TypeError as error:
        raise TaskError(f"task {task.id}: the instruction {kind} does not take {given}: {error}") from error


def _related(count: int, relation: str, number: int) -> bool:
    if relation not in ("at least", "less than"):
        raise ConfigError(f"an instruction's relation must be 'at least' or 'less than', got {relation!r}")
    return count >= number if relation == "at least" else count < number


def _paragraphs(text: str, num_paragraphs: int) -> bool:
    """Parted by ***; only the first and the last part may be empty, and then do not count."""
    parts = [part.strip() for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(map(bool, parts)) == num_paragraphs


def _first_word(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """Paragraphs are parted by blank lines; the word counts up to a sign of punctuation."""
    parts = text.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != num_paragraphs or nth_paragraph > count or not parts[nth_paragraph - 1].strip():
        return False
    word = parts[nth_paragraph - 1].split()[0].lstrip("'").lstrip('"')
    return re.split(r"[.,?!'\"]", word)[0].lower() == first_word.lower()


def _placeholders(text: str, num_placeholders: int) -> bool:
    """[parts] that are not broken over lines."""
    closed = [part for line in text.split("\n") for part in line.split("]")[:-1]]
    return sum("[" in part for part in closed) >= num_placeholders


def _postscript(text: str, postscript_marker: str) -> bool:
    spelled = {"P.S.": r"p\.\s?s\.", "P.P.S": r"p\.\s?p\.\s?s"}
    pattern = spelled[postscript_marker] if postscript_marker in spelled else re.escape(postscript_marker.lower())
    return re.search(pattern, text.lower()) is not None


def _highlights(text: str, num_highlights: int) -> bool:
    """*parts* and **parts** that hold something."""
    single = [part.strip("*").strip() for part in re.findall(r"\*[^\n*]*\*", text)]
    double = [part.strip() for part in re.findall(r"\*\*([^\n*]*)\*\*", text)]
    return sum(map(bool, single + double)) >= num_highlights


def _is_json(text: str) -> bool:
    """Also between the lines of a fenced code block."""
    inside = re.sub(r"^```(?:json|Json|JSON)?", "", text.strip()).removesuffix("```")
    try:
        json.loads(inside)
    except (ValueError, RecursionError):
        return False
    return True


def _title(text: str) -> bool:
    """Something between << and >>, on one line."""
    titles = [line.partition("<<")[2].rpartition(">>")[0] for line in text.split("\n")]
    return any(title.lstrip("<").rstrip(">").strip() for title in titles)


def _two_responses(text: str) -> bool:
    """Two different texts parted by six stars; only the first and last part may be empty."""
    parts = [part.strip() for part in text.split("******")]
    texts = [part for part in parts if part]
    return all(parts[1:-1]) and len(texts) == 2 and texts[0] != texts[1]


def _capital_words(text: str, capital_frequency: int, capital_relation: str) -> bool:
    """Words as NLTK has them: DON'T is two, WELL-KNOWN is one."""
    from nltk.tokenize import NLTKWordTokenizer  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    words: list[list[str]] = [NLTKWordTokenizer().tokenize(sentence) for sentence in _sentences(text)]
    return _related(sum(word.isupper() for sentence in words for word in sentence), capital_relation, capital_frequency)


def _is_in(text: str, language: str) -> bool:
    """Also a text in which no language can be recognised."""
    return recognised_language(text) in (language, "")


# Each kind of instruction, and its check of a text, whose other parameters are named as the instruction's arguments.
# Keywords and words are regular expressions, as in the data.
KINDS: dict[str, Check] = {
    "keywords:existence": lambda text, keywords: all(re.search(one, text, re.IGNORECASE) for one in keywords),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:frequency": lambda text, keyword, frequency, relation: _related(
        len(re.findall(keyword, text, re.IGNORECASE)), relation, frequency
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _related(
        text.lower().count(letter.lower()), let_relation, let_frequency
    ),
    "length_constraints:number_words": lambda text, num_words, relation: _related(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _related(
        len(_sentences(text)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    # lines that begin with a dash, or with a single star; a bare star takes the next line with it
    "detectable_format:number_bullet_lists": lambda text, num_bullets: (
        len(re.findall(r"^[^\S\n]*+(?:-|\*[^*]).*$", text, re.MULTILINE)) == num_bullets
    ),
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"{section_spliter.strip()}\s?\d+", text)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": _title,
    "detectable_format:constrained_response": lambda text: any(
        f"My answer is {answer}." in text for answer in ("yes", "no", "maybe")
    ),
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": lambda text: re.fullmatch(r'".*"', text.strip(), re.DOTALL) is not None,
    "punctuation:no_comma": lambda text: "," not in text,
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text: text.isupper() and _is_in(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and _is_in(text, "en"),
    "language:response_language": _is_in,
}


@functools.lru_cache(maxsize=1024)
def recognised_language(text: str) -> str:
    """The ISO 639-1 code of a text's language, the same in every run; "" where it has none, such as digits."""
    import langdetect  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    langdetect.DetectorFactory.seed = 0
    try:
        return str(langdetect.detect(text))
    except langdetect.LangDetectException:
        return ""


@functools.cache
def _punkt() -> Any:
    """NLTK's model of English sentences; None where its data are not installed."""
    from nltk.tokenize import PunktTokenizer  # noqa: PLC0415  # pyright: ignore[reportMissingTypeStubs]

    try:
        return PunktTokenizer("english")
    except LookupError:
        return None


_ABBREVIATIONS = re.compile(
    r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sr|Jr|vs|etc|Inc|Ltd|Co|No|Fig|e\.g|i\.e|a\.m|p\.m|U\.S|[A-Z])\.(?=\s+\S)"
)
_SENTENCE_END = re.compile(r"[.!?][\"'\u201d\u2019)\]*_]*(?=\s)")


def _sentences(text: str) -> list[str]:
    """By NLTK's model; without it what ends in . ! or ?, but not at an abbreviation or within a number."""
    if (model := _punkt()) is not None:
        return model.tokenize(text)
    parts = _SENTENCE_END.split(_ABBREVIATIONS.sub(lambda found: found[0][:-1], text))
    return [part for part in parts if part.strip("\"') \n")]
