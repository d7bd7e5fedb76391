from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_fr.agents.contract import Prompt
from megatron_fr.errors import ConfigError
from megatron_fr.rollout.cursor import PromptCursor
from megatron_fr.rollout.prompts import load_prompts

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
RECORDS: list[dict[str, Any]] = [
    {"prompt": "1 + 1?", "answer": 2, "id": "first", "level": "easy"},
    {"messages": CHAT, "answer": "4", "tags": ["a", "b"]},
    {"prompt": CHAT},
]


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_jsonl_gives_prompts_answers_ids_and_metadata(tmp_path: Path) -> None:
    first, second, third = load_prompts(write(tmp_path / "p.jsonl", RECORDS[0], "", *RECORDS[1:]))
    assert first == Prompt("first", ({"role": "user", "content": "1 + 1?"},), 2, {"level": "easy"})
    assert second == Prompt("1", tuple(CHAT), "4", {"tags": ["a", "b"]})
    assert third == Prompt("2", tuple(CHAT), None, {})


def test_parquet_gives_the_same_prompts_and_ignores_absent_columns(tmp_path: Path) -> None:
    rows = [RECORDS[1], {"prompt": "x", "id": 7, "answer": "y", "tags": None}]
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=_schema()), path)
    first, second = load_prompts(path)
    assert first == Prompt("0", tuple(CHAT), "4", {"tags": ["a", "b"]})
    assert second == Prompt("7", ({"role": "user", "content": "x"},), "y", {"tags": None})


def _schema() -> pyarrow.Schema:
    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])
    text = pyarrow.string()
    return pyarrow.schema(
        [
            ("messages", pyarrow.list_(message)),
            ("prompt", text),
            ("answer", text),
            ("id", pyarrow.int64()),
            ("tags", pyarrow.list_(text)),
        ]
    )


def test_messages_written_as_json_text_are_messages(tmp_path: Path) -> None:
    (prompt,) = load_prompts(write(tmp_path / "p.jsonl", {"messages": json.dumps(CHAT)}))
    assert prompt.messages == tuple(CHAT)


def test_a_line_ends_at_its_line_end_alone(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    text = "one\u2028two\x85three \U0001f600"
    path.write_text(json.dumps({"prompt": text}, ensure_ascii=False) + "\n" + json.dumps({"prompt": text}), "utf-8")
    assert [prompt.messages[0]["content"] for prompt in load_prompts(path)] == [text, text]


def test_arguments_that_only_other_rows_have_are_no_nulls(tmp_path: Path) -> None:
    def row(**arguments: str) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "python", "arguments": arguments}}
        return {"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}, CHAT[1]]}

    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row(code="1"), row(query="x")]), path)
    calls = [prompt.messages[0]["tool_calls"][0]["function"]["arguments"] for prompt in load_prompts(path)]
    assert calls == [{"code": "1"}, {"query": "x"}]


def test_a_dataset_is_read_by_name_and_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "some_dataset"
    folder.mkdir()
    write(folder / "train.jsonl", {"prompt": "a", "answer": 1, "kind": "t"}, {"prompt": "b", "answer": 2, "kind": "t"})
    write(folder / "test.jsonl", {"prompt": "c", "answer": 3, "kind": "e"})
    train, test = load_prompts(str(folder), "train"), load_prompts(str(folder), "test")
    assert [(p.messages[0]["content"], p.answer, dict(p.metadata)) for p in train] == [
        ("a", 1, {"kind": "t"}),
        ("b", 2, {"kind": "t"}),
    ]
    assert [p.messages[0]["content"] for p in test] == ["c"]
    with pytest.raises(ConfigError, match=r"neither a file nor a dataset that could be read \(split 'nope'\)"):
        load_prompts(str(folder), "nope")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{oops", r"line 2: is no JSON"),
        ([1], r"line 2: is list, expected an object"),
        ('{"prompt": "x", "answer": ' + "9" * 5000 + "}", r"line 2: is no JSON"),
        ('{"prompt": "x", "answer": ' + "[" * 100_000 + "}", r"line 2: is no JSON"),
        (r'{"prompt": "smile \ud83d"}', r"line 2: holds half a surrogate pair"),
        ({"messages": "What is 1 + 1?"}, r"line 2, field 'messages': is text, but no JSON"),
        ({"prompt": [*CHAT, {"role": "assistant", "content": "4"}]}, r"ends with an assistant's message.*'answer'"),
        ({"answer": 1}, r"line 2: has neither 'prompt' nor 'messages'"),
        ({"prompt": "a", "messages": CHAT}, r"line 2: has both"),
        ({"prompt": 5}, r"line 2, field 'prompt': is 5, expected a string or a list of messages"),
        ({"prompt": "  "}, r"field 'prompt': is empty"),
        ({"messages": []}, r"field 'messages': is \[\]"),
        ({"messages": ["a"]}, r"field 'messages'\[0\]: is 'a'"),
        ({"messages": [{"role": "bot", "content": "a"}]}, r"field 'messages'\[0\].role: is 'bot'"),
        ({"messages": [{"role": "user"}]}, r"field 'messages'\[0\].content: is None"),
        ({"prompt": "again", "id": "0"}, r"records 1 and 2 share id='0'"),
    ],
)
def test_a_malformed_record_is_refused_by_file_line_and_field(tmp_path: Path, line: Any, reason: str) -> None:
    path = write(tmp_path / "p.jsonl", {"prompt": "fine"}, line)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_prompts(path)
    assert str(path) in str(caught.value)


def test_missing_empty_and_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_prompts(tmp_path / "nope.jsonl")
    with pytest.raises(ConfigError, match="holds no record"):
        load_prompts(write(tmp_path / "empty.jsonl"))
    with pytest.raises(ConfigError, match=r"unknown format '\.csv'"):
        load_prompts(write(tmp_path / "p.csv", "a,b"))
    with pytest.raises(ConfigError, match="no readable parquet"):
        load_prompts(write(tmp_path / "p.parquet", "not parquet"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}\n')
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_prompts(tmp_path / "latin.jsonl")


PROMPTS = [Prompt(str(i), ({"role": "user", "content": "x"},)) for i in range(10)]


def ids(cursor: PromptCursor, count: int) -> list[str]:
    return [prompt.id for prompt in itertools.islice(cursor, count)]


def test_every_epoch_uses_each_prompt_once_in_an_order_of_its_own() -> None:
    cursor = PromptCursor(PROMPTS, seed=1)
    epochs = [ids(cursor, 10) for _ in range(3)]
    assert all(sorted(epoch) == [p.id for p in PROMPTS] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert cursor.position == 30


def test_the_order_depends_on_the_seed_alone() -> None:
    assert ids(PromptCursor(PROMPTS, seed=1), 25) == ids(PromptCursor(PROMPTS, seed=1), 25)
    assert ids(PromptCursor(PROMPTS, seed=1), 25) != ids(PromptCursor(PROMPTS, seed=2), 25)


def test_a_restored_position_goes_on_where_it_was() -> None:
    whole = ids(PromptCursor(PROMPTS, seed=3), 35)
    for position in (0, 4, 10, 27):
        cursor = PromptCursor(PROMPTS, seed=3)
        ids(cursor, 33)
        cursor.seek(position)
        assert ids(cursor, 35 - position) == whole[position:]


def test_without_shuffling_epochs_follow_the_file() -> None:
    assert ids(PromptCursor(PROMPTS[:3], shuffle=False), 7) == ["0", "1", "2", "0", "1", "2", "0"]


def test_a_cursor_needs_prompts_and_a_position_that_exists() -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        PromptCursor([])
    with pytest.raises(ValueError, match="negative"):
        PromptCursor(PROMPTS).seek(-1)
