"""`mtgrpo show --tokens`: each token as the policy saw it and was paid for it, with colours and without."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from mtgrpo.commands.show import main
from mtgrpo.commands.shown_tokens import ShownTokens
from mtgrpo.errors import ConfigError
from mtgrpo.record.decoding import pieces
from recorded import TOKENIZER, encode, make_recorded

BACKEND = TOKENIZER.backend_tokenizer


def test_a_conversation_is_shown_with_what_was_sampled_and_paid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_recorded(tmp_path)
    assert main([str(tmp_path), "--tokens", "--sample", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "sampled tokens stand in <>, after their advantage; the others are not trained"
    assert (
        lines[2:]
        == [
            "",
            "tools of what follows:",
            "none",
            "sums/0, sample 1: reward 0, completed, expected 391",
            "[a new context]",
            "<|im_start|>user",
            "17 * 20?<|im_end|>",
            "<|im_start|>assistant",
            "<-0.25 let me think<|im_end|>>  turn 1: 5 tokens, advantage -0.25, ratio to the sampler 1.01 to 1.01, "
            "entropy 0.5",
            "[a new context]",  # the sibling that condenses
            "<|im_start|>user",
            "17",
            "<|im_start|>user",
            "go on<|im_end|>",
            "<|im_start|>assistant",
            "<-0.25 #### 39é1<|im_end|>>  turn 2: 7 tokens, advantage -0.25, ratio to the sampler 1.01 to 1.01, "
            "entropy 0.5",
            *lines[18:],
        ]
    )
    assert "sums/1, sample 1" in "\n".join(lines[18:]) and "no advantage 5" in "\n".join(lines[18:])


@pytest.mark.parametrize(("colours", "numbers"), [(True, False), (False, True)])
def test_colours_stand_for_numbers(
    colours: bool, numbers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colours:
        monkeypatch.setenv("NO_COLOR", "1")
    shown = ShownTokens(make_recorded(tmp_path), "")
    out = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200)
    for text in (shown.legend(out), *shown.lines(0, {"task": "t"}, out)):
        out.print(text)
    said = out.file.getvalue()  # type: ignore[attr-defined]
    assert ("\x1b[" in said and "48;2;0;110;60" in said) is colours  # the largest advantage, in full
    assert ("<+0.75 " in said) is numbers


def test_what_would_control_the_terminal_is_spelled_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_recorded(tmp_path, answers=["\x1b[2J\u202eevil 391"] * 2)
    main([str(tmp_path), "--tokens"])
    said = capsys.readouterr().out
    assert "\x1b" not in said and "\u202e" not in said and "\\x1b[2J\\u202eevil 391" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--step", "7"], "has kept no tokens of step_000007; it has those of the steps 1, 2"),
        (["--before"], "has kept no tokens of evaluation_before"),
        (["--sample", "9"], "has no such conversation"),
    ],
)
def test_what_is_not_there_is_said(words: list[str], said: str, tmp_path: Path) -> None:
    make_recorded(tmp_path)
    with pytest.raises(ConfigError, match=said):
        main([str(tmp_path), "--tokens", *words])


def test_without_a_tokenizer_it_says_so(tmp_path: Path) -> None:
    file = make_recorded(tmp_path) / "checkpoints" / "step_000001" / "tokenizer.json"
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is no tokenizer"):
        main([str(tmp_path), "--tokens"])
    file.unlink()
    with pytest.raises(ConfigError, match="has no checkpoint yet"):
        main([str(tmp_path), "--tokens"])


@given(st.text(max_size=40))
def test_each_token_has_the_characters_that_it_completes(text: str) -> None:
    tokens = encode(text)
    found = pieces(BACKEND, tokens)
    assert len(found) == len(tokens) and "".join(found) == BACKEND.decode(tokens, skip_special_tokens=False)


def test_a_character_of_several_tokens_belongs_to_the_last() -> None:
    tokens = encode("a😀b")
    assert [piece for piece in pieces(BACKEND, tokens) if piece] == ["a", "😀", "b"] and len(tokens) > 3


def test_bytes_that_never_become_a_character_hold_nothing_up() -> None:
    broken = encode("😀")[0]
    found = pieces(BACKEND, [broken] * 3000)
    assert len(found) == 3000 and set("".join(found)) == {"\ufffd"}
