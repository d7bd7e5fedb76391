"""Damaged and mismatched model folders: one clear error that names the file and the tensor."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint

from megatron_fr.config import RunConfig
from megatron_fr.convert.inspect import inspect_folder
from megatron_fr.convert.megatron import convert_hf_to_megatron, convert_megatron_to_hf
from megatron_fr.errors import ConfigError, ModelError
from megatron_fr.hf.folder import read_spec
from megatron_fr.hf.model import load_hf_weights, save_hf_folder
from megatron_fr.hf.weights import open_weights
from tests.support.parallel_launch import run_ranks
from tools.tiny import make_untrained


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_untrained(tmp_path_factory.mktemp("source"))


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def _load_error(folder: Path) -> str:
    """The files are checked before any parameter is touched, so no model is needed."""
    spec = read_spec(folder)
    with pytest.raises(ModelError) as caught:
        load_hf_weights([], spec, folder)
    return str(caught.value)


def _rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _split(folder: Path) -> None:
    """Turn the single weight file into two with an index."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (i >= len(names) // 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: t for n, t in tensors.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (folder / "model.safetensors").unlink()


def test_a_missing_folder_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path='.*/nowhere'.*not a folder"):
        read_spec(tmp_path / "nowhere")


def test_a_folder_without_configuration_names_the_field(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"model\.path=.*no config\.json"):
        read_spec(folder)


def test_a_configuration_that_is_no_json_is_a_model_error(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        read_spec(folder)


def test_an_unknown_architecture_is_named(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen9ForCausalLM"]}))
    with pytest.raises(ModelError, match=r"config\.json: model architecture \['Qwen9ForCausalLM'\] has no mapping"):
        read_spec(folder)


def test_more_experts_a_token_than_there_are_is_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 9}))
    with pytest.raises(ModelError, match=r"num_experts_per_tok is 9, of 8 experts"):
        read_spec(folder)


def test_of_a_hub_name_no_weights_are_fetched_for_the_configuration(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is played by its client's own filter over a repository's names."""
    small = {path.name for path in source.iterdir()} - {"model.safetensors"} | {"merges.txt", "chat_template.jinja"}
    extra = {"model.safetensors.index.json", "model-1.safetensors", "model.gguf", "README.md", "onnx/config.json"}
    seen: list[set[str]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: Any = None, ignore_patterns: Any = None) -> str:
        assert repo_id == "someone/model"
        names = small | extra | {"model.safetensors"}
        kept = filter_repo_objects(sorted(names), allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        seen.append(set(kept))
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *_, **__: None)
    assert read_spec("someone/model").experts == 8
    with pytest.raises(ConfigError, match="--tp=3 does not divide"):
        convert_hf_to_megatron("someone/model", tmp_path / "out", tp=3)
    checkpoint.save({"decoder.weight": torch.ones(1)}, checkpoint_id=tmp_path / "megatron", no_dist=True)
    with pytest.raises(ModelError, match="no tensor for 'embedding"):
        convert_megatron_to_hf(tmp_path / "megatron", tmp_path / "out", hf_dir="someone/model")
    assert {"model.safetensors", "model-1.safetensors"} <= seen[1]
    assert [seen[0], seen[2]] == [small, small]


def test_a_quantised_folder_is_described_and_refused_as_the_source_of_weights(folder: Path) -> None:
    assert "float8" not in inspect_folder(folder)
    tensors, name = load_file(folder / "model.safetensors"), "model.layers.0.self_attn.q_proj.weight"
    eight = tensors | {name: tensors[name].to(torch.float8_e4m3fn)}
    scales = {f"{name}_scale": torch.ones(()), name.replace("weight", "input_scale"): torch.ones(())}
    _rewrite(folder, eight | scales)
    config = json.loads((folder / "config.json").read_text())
    quantisation = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    assert "quantised: 1 float8 tensors, each with its scale" in inspect_folder(folder)
    assert "quantization_config says quantised weights; give the folder that was" in _load_error(folder)
    _rewrite(folder, eight)
    with pytest.raises(ModelError, match=rf"model\.safetensors: tensor '{name}' is float8 and has no scale"):
        inspect_folder(folder)


def test_a_truncated_weight_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    assert re.search(r"model\.safetensors is damaged or incomplete .*; fetch it again", _load_error(folder))


def test_a_folder_without_weights_says_so(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in _load_error(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    _split(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert re.search(r"model-00002-of-00002\.safetensors is missing", _load_error(folder))


def test_a_shard_that_lacks_what_the_index_says_is_named(folder: Path) -> None:
    _split(folder)
    path = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(path)
    lost = sorted(tensors)[0]
    del tensors[lost]
    save_file(tensors, path)
    message = _load_error(folder)
    assert "model-00001-of-00002.safetensors" in message
    assert lost in message


def test_a_missing_tensor_is_named(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    _rewrite(folder, tensors)
    assert "'model.layers.1.mlp.experts.5.up_proj.weight'" in _load_error(folder)


def test_a_tensor_that_nothing_uses_is_named(folder: Path) -> None:
    _rewrite(folder, load_file(folder / "model.safetensors") | {"model.layers.0.self_attn.q_proj.bias": torch.ones(3)})
    message = _load_error(folder)
    assert "nothing uses tensor 'model.layers.0.self_attn.q_proj.bias'" in message
    assert "model.safetensors" in message


def test_a_layer_for_multi_token_prediction_is_left_out(tmp_path: Path) -> None:
    folder = make_untrained(tmp_path / "glm", family="glm4_moe")
    config = json.loads((folder / "config.json").read_text())
    _rewrite(folder, load_file(folder / "model.safetensors") | {"model.layers.2.eh_proj.weight": torch.ones(3)})
    assert "nothing uses tensor 'model.layers.2.eh_proj.weight'" in _load_error(folder)
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert "model.layers.2.eh_proj.weight" in open_weights(folder, read_spec(folder)).names


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    _rewrite(folder, tensors | {name: tensors[name].T.contiguous()})
    message = _load_error(folder)
    assert name in message
    assert "(80, 96)" in message
    assert "(96, 80)" in message


def _save_on_ranks(source: Path, folder: Path) -> list[str]:
    """Write a folder twice over itself, then where it cannot be written; return the error of the last attempt."""
    from megatron_fr.runtime.device import resolve_device
    from megatron_fr.trainer import distributed
    from megatron_fr.trainer.model import build_model

    config = _config(source)
    device = resolve_device("cpu")
    distributed.initialize(config.parallel, device, seed=1, timeout_s=60)
    spec = read_spec(source)
    chunks = build_model(spec, config, device)
    load_hf_weights(chunks, spec, source)
    for _ in range(2):
        save_hf_folder(chunks, spec, source, folder)
    errors = []
    try:
        save_hf_folder(chunks, spec, source, folder / "config.json" / "below-a-file")
    except ModelError as error:
        errors.append(str(error))
    distributed.shutdown()
    return errors


def _config(folder: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "parallel": {"world_size": 2, "ep": 2},
            "train": {"num_updates": 1, "batch_size": 2},
            "reward": {"function": "unused:unused"},
            "data": {"train": "unused.jsonl"},
        }
    )


@pytest.mark.slow
def test_a_folder_is_replaced_whole_in_the_stated_dtype_and_a_failed_write_is_an_error_on_every_rank(
    folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    out = tmp_path / "out"
    errors = run_ranks(_save_on_ranks, 2, source=folder, folder=out)
    assert all(len(found) == 1 and "could not be written" in found[0] for found in errors)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model", "out"]
    written, original = load_file(out / "model.safetensors"), load_file(folder / "model.safetensors")
    assert written.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(written[name], tensor.bfloat16())
