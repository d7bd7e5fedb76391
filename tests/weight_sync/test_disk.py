"""The folders of the disk transport: whole, of the pushed bytes, two of them, and none of half a version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_fr.errors import SyncError
from megatron_fr.hf.weights import WeightFiles
from megatron_fr.weight_sync.publisher import WeightPublisher
from tests.support.small_disk import SmallDisk
from tests.support.transports import make_context, weights
from tools.tiny import make_untrained


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [make_untrained(folder / f"{seed}", seed=seed, family="qwen3_moe") for seed in (1, 2)]


def publisher(model: Path, output: Path, folder: Path | None = None) -> WeightPublisher:
    made = WeightPublisher(make_context(model, output, transport="disk", folder=folder))
    made.connect()
    return made


def written(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in folder.glob("*.safetensors") for name, t in load_file(file).items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_version_is_a_whole_model_folder_and_the_last_two_stay(models: list[Path], tmp_path: Path) -> None:
    made, out = publisher(models[0], tmp_path), tmp_path / "weight_sync"
    (out / "version-000099").mkdir()  # of an earlier run
    (out / "version-000098.tmp").mkdir()
    (out / "notes").mkdir()  # not the transport's
    for version in (3, 4, 5):
        model = models[version % 2]
        made.publish(version, weights(model))
        found = written(out / f"version-{version:06d}")
        wanted = dict(weights(model))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert names(out) == ["notes", "version-000004", "version-000005"]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(out / "version-000005")
    assert torch.equal(loaded.lm_head.weight, dict(weights(models[1]))["lm_head.weight"])
    assert len(AutoTokenizer.from_pretrained(out / "version-000005")) > 100
    assert set(WeightFiles(out / "version-000005").names) == set(dict(weights(models[1])))
    made.close()


def test_the_same_version_can_be_pushed_again(models: list[Path], tmp_path: Path) -> None:
    made = publisher(models[0], tmp_path)
    made.publish(0, weights(models[0]), weights(models[1]))
    found = written(tmp_path / "weight_sync" / "version-000000")
    assert torch.equal(found["lm_head.weight"], dict(weights(models[1]))["lm_head.weight"])
    made.close()


def test_a_push_that_breaks_off_leaves_the_version_before_it(models: list[Path], tmp_path: Path) -> None:
    made = publisher(models[0], tmp_path)
    made.publish(1, weights(models[0]))

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        for i, named in enumerate(weights(models[1])):
            if i == 40:
                raise SyncError("a trainer rank is gone")
            yield named

    with pytest.raises(SyncError, match="a trainer rank is gone"):
        made.publish(2, broken())
    assert names(tmp_path / "weight_sync") == ["version-000001"]
    made.close()


def test_a_full_disk_is_named_and_leaves_the_version_before_it(
    models: list[Path], tmp_path: Path, small_disk: SmallDisk
) -> None:
    made = publisher(models[0], tmp_path, small_disk.folder / "weights")
    made.publish(1, weights(models[0]))
    small_disk.fill(but=300_000)
    with pytest.raises(
        SyncError, match=r"weights cannot be written to .*/weights \(.*o space left.*set sync.folder to"
    ):
        made.publish(2, weights(models[1]))
    assert names(small_disk.folder / "weights") == ["version-000001"]
    small_disk.empty()
    made.publish(2, weights(models[1]))
    assert names(small_disk.folder / "weights") == ["version-000001", "version-000002"]
    made.close()


def test_a_folder_that_cannot_be_made_is_named(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SyncError, match=r"weights cannot be written to .*/file/weights \(.*Not a directory"):
        publisher(models[0], tmp_path, tmp_path / "file" / "weights")
