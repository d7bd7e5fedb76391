"""Counts of the plan against built models, and the published models on the meta device."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from pydantic import ValidationError
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from megatron_fr.cli.__main__ import main
from megatron_fr.cli.plan import activation_bytes, batch_bytes, count_parameters, head_bytes, legal_layouts, rank_memory
from megatron_fr.config import RunConfig
from megatron_fr.config.sections import ParallelConfig
from megatron_fr.errors import ConfigError
from megatron_fr.hf.export import hf_tensor_specs
from megatron_fr.hf.folder import read_spec
from megatron_fr.models.registry import model_spec
from megatron_fr.models.spec import ModelSpec
from megatron_fr.runtime.device import resolve_device
from megatron_fr.trainer.data.batch import BatchLayout, RouteShape, build_micro_batch
from megatron_fr.trainer.logprob import LogprobSettings, head_logprobs
from megatron_fr.trainer.model import build_transformer_config
from megatron_fr.trajectory import NO_VERSION, Trajectory
from tests.support.parallel_launch import initialize_layout, run_ranks
from tests.support.published import CONFIGS, COUNTS
from tools.tiny import make_untrained
from tools.tiny.model import Family, tiny_config

PUBLISHED = {name: model_spec(config) for name, config in CONFIGS.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_map_without_a_leftover_or_missing_tensor(name: str) -> None:
    config, spec = CONFIGS[name], PUBLISHED[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    specs = {tensor.name: tensor.shape for tensor in hf_tensor_specs(spec, torch.bfloat16)}
    buffers = [name for name in specs if name.endswith("e_score_correction_bias")]
    assert len(buffers) == (45 if name == "GLM-4.5-Air" else 0)
    assert all(specs.pop(name) == (128,) for name in buffers)
    assert sum(torch.Size(shape).numel() for shape in specs.values()) == COUNTS[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == COUNTS[name]
    ours = {key: shape for key, shape in specs.items() if ".mlp.experts." not in key}
    theirs = {key: tuple(p.shape) for key, p in model.named_parameters() if ".mlp.experts." not in key}
    assert ours == theirs
    assert sum(count_parameters(spec, ParallelConfig(), 0)) == COUNTS[name]


def counted_and_built(jobs: list[tuple[Path, dict[str, int]]]) -> list[tuple[int, int]]:
    answers = []
    for folder, layout in jobs:
        config, device = initialize_layout(folder, layout)
        from megatron.core import parallel_state

        from megatron_fr.trainer.model import build_model

        spec = read_spec(folder)
        chunks = build_model(spec, config, device)
        built = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        stage = parallel_state.get_pipeline_model_parallel_rank()
        answers.append((sum(count_parameters(spec, config.parallel, stage)), built))
        parallel_state.destroy_model_parallel()
    return answers


def test_interleaved_stages_take_turns_at_the_layers() -> None:
    model = tiny("qwen3_moe", num_layers=4, mlp_only_layers=[0, 1])
    interleaved = ParallelConfig(world_size=2, pp=2, vpp=2)
    # Stage 0 has layers 0 and 2, stage 1 layers 1 and 3: one with experts each.
    one_layer = 8 * 3 * 96 * 80
    assert [count_parameters(model, interleaved, stage)[1] for stage in range(2)] == [one_layer, one_layer]
    plain = ParallelConfig(world_size=2, pp=2)
    assert [count_parameters(model, plain, stage)[1] for stage in range(2)] == [0, 2 * one_layer]
    # What the layers keep for the backward differs in the same way: none of stage 0's has experts in the plain one.
    narrow = [activation_bytes(model, run_config(), layout, 0) for layout in (plain, interleaved)]
    assert narrow[0] / 2 < narrow[1] / 2.5  # in flight: 2, and 5 halves


def kept_by_real_layers(jobs: list[tuple[Path, dict[str, int]]], tokens: int) -> list[float]:
    """Elements per token of what a layer's forward saves for its backward, in tensors of the model's dtype."""
    answers = []
    for folder, layout in jobs:
        config, device = initialize_layout(folder, layout)
        from megatron.core import parallel_state

        from megatron_fr.trainer.model import build_model

        chunk = build_model(read_spec(folder), config, device, routing_replay=False)[0]
        parameters = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
        kept: dict[int, torch.Tensor] = {}  # alive until counted, so that no address is used twice

        def keep(tensor: torch.Tensor, parameters: set[int] = parameters, kept: Any = kept) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in parameters and tensor.dtype is torch.float32:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        for parameter in chunk.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        ranks = layout.get("tp", 1) if chunk.config.sequence_parallel else 1
        hidden = torch.randn(tokens // ranks, 1, chunk.config.hidden_size, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            chunk.decoder.layers[0](hidden, rotary_pos_emb=chunk.rotary_pos_emb(tokens))
        answers.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 4 / tokens)
        parallel_state.destroy_model_parallel()
    return answers


@pytest.mark.slow
def test_layers_keep_what_real_ones_keep(tmp_path: Path) -> None:
    """What one more layer adds to the plan, against one of Megatron's local layers."""
    tokens, hidden, ffn, head_dim, q, kv, inner = 128, 256, 640, 64, 512, 256, 4 * 192
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_attention_heads": 8, "num_key_value_heads": 4}
    experts = {"head_dim": head_dim, "moe_intermediate_size": 192, "num_experts_per_tok": 4}
    models: dict[str, list[Any]] = {
        "dense": [tiny_hf("qwen2", num_layers=n, **sizes, head_dim=head_dim) for n in (1, 2)],
        "moe": [tiny_hf("qwen3_moe", num_layers=n, **sizes, **experts) for n in (1, 2)],
    }
    for name, pair in models.items():
        pair[0].save_pretrained(tmp_path / name)
    layouts: list[tuple[str, dict[str, int]]] = [
        ("dense", {}),
        ("moe", {}),
        ("moe", {"tp": 2}),
        ("moe", {"tp": 2, "etp": 2}),
    ]
    jobs = [(tmp_path / name, layout) for name, layout in layouts]
    real = run_ranks(kept_by_real_layers, 2, jobs=jobs, tokens=tokens)[0]
    rollout = {"max_context": tokens, "max_new_tokens": tokens // 2}
    config = run_config(
        model={"dtype": "float32"}, rollout=rollout, train={"micro_batch_size": 1}, sync={"probe_tokens": 4}
    )
    for (name, layout), kept in zip(layouts, real, strict=True):
        parallel, ranks = ParallelConfig(world_size=2, **layout), layout.get("tp", 1)
        one, two = (activation_bytes(model_spec(m), config, parallel, 0) / 4 / tokens for m in models[name])
        # What only unfused layers keep: normalised inputs of norms, the rotation's factors, the steps of SwiGLU.
        norms = 2 * hidden + (q + kv if name == "moe" else 0)
        unfused = norms / ranks + 4 * head_dim + (3 * inner / ranks if name == "moe" else 2 * ffn)
        assert kept == pytest.approx(two - one + unfused, rel=0.01), (name, layout)


@pytest.mark.slow
def test_counts_equal_those_of_built_models_on_every_rank(tmp_path: Path) -> None:
    moe = make_untrained(tmp_path / "moe", vocab_size=515)
    tied = make_untrained(tmp_path / "tied", family="qwen2", tie=True, vocab_size=515)
    glm = make_untrained(tmp_path / "glm", family="glm4_moe", vocab_size=515)
    mixed = tmp_path / "mixed"
    tiny_hf("qwen3_moe", num_layers=4, mlp_only_layers=[0, 1]).save_pretrained(mixed)
    jobs = [
        (mixed, {"pp": 2, "vpp": 2}),
        (moe, {"tp": 2}),
        (glm, {"tp": 2}),
        (glm, {"pp": 2}),
        (moe, {"ep": 2}),
        (moe, {"pp": 2}),
        (moe, {"tp": 2, "etp": 2}),
        (tied, {"tp": 2}),
        (tied, {"pp": 2}),
    ]
    for answers in run_ranks(counted_and_built, 2, jobs=jobs):
        for job, (counted, built) in zip(jobs, answers, strict=True):
            assert counted == built, job


def run_config(**sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "model": {"path": "unused"},
        "train": {"num_updates": 1, "batch_size": 128, "micro_batch_size": 2},
        "rollout": {"max_context": 1000, "max_new_tokens": 300},
        "reward": {"function": "unused:unused"},
        "data": {"train": "unused.jsonl"},
    }
    return RunConfig.model_validate({k: values.get(k, {}) | sections.get(k, {}) for k in (*values, *sections)})


def tiny(family: Family, **changes: Any) -> ModelSpec:
    return model_spec(tiny_hf(family, **changes))


def tiny_hf(family: Family, **changes: Any) -> Any:
    """The configuration of a tiny model, as its folder would give it."""
    config = tiny_config(family, num_layers=changes.pop("num_layers", 2))
    config.update(changes)
    return config


def test_only_action_tokens_go_through_the_head_and_what_it_holds_depends_on_its_mode() -> None:
    model, one = PUBLISHED["Qwen2.5-7B-Instruct"], ParallelConfig()
    weight = 152064 * 3584 * 2
    scratch = (1 << 25) * 4
    assert head_bytes(model, run_config(), one) == 600 * 152064 * 2 + 600 * 3584 * 4 + weight + scratch
    recompute = run_config(train={"logprob_mode": "recompute", "logprob_chunk_tokens": 64})
    assert head_bytes(model, recompute, one) == 64 * 152064 * 2 + 600 * 3584 * 6 + weight + 64 * 152064 * 4
    packed = run_config(train={"max_tokens_per_micro_batch": 4000})
    two = ParallelConfig(world_size=4, tp=2, cp=2)
    assert head_bytes(model, packed, two) == 2000 * 76032 * 2 + 2000 * 3584 * 4 + weight // 2 + scratch
    stages = ParallelConfig(world_size=2, pp=2)
    assert rank_memory(model, run_config(), stages).head in (0, head_bytes(model, run_config(), stages))


@pytest.mark.parametrize(("mode", "chunk"), [("keep", 700), ("recompute", 100)])
def test_the_heads_peak_is_that_of_a_real_head(mode: Literal["keep", "recompute"], chunk: int) -> None:
    """The terms of the plan's formula against what torch's profiler sees allocated, on a CPU in float32."""
    tokens, hidden_size, vocab = 700, 64, 20_000
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        logprobs, _ = head_logprobs(hidden, weight, targets, LogprobSettings(vocab, mode=mode, chunk_tokens=chunk))
        logprobs.sum().backward()
    running = peak = 0
    for event in sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            running += event.nbytes()
            peak = max(peak, running)
    planned = chunk * vocab * 4 + tokens * hidden_size * 4 + vocab * hidden_size * 4
    assert 0.95 * planned < peak < 1.05 * planned + 4 * (1 << 18)  # the float32 scratch of a CPU


def test_recomputation_keeps_inputs_in_flight_and_one_whole_layer_at_a_time() -> None:
    model = PUBLISHED["Qwen2.5-7B-Instruct"]
    stages = ParallelConfig(world_size=4, pp=4)
    layer = 3584 * 3 + 512 * 3 + 4 * 3584 + 3 * 18944
    work = 18944 + 3584
    kept = [activation_bytes(model, run_config(), stages, stage) for stage in range(4)]
    assert kept == [(7 * layer * flight + work) * 2000 * 2 for flight in (4, 3, 2, 1)]
    full = run_config(train={"recompute": "full"})
    assert activation_bytes(model, full, stages, 0) == (7 * 3584 * 4 + layer + work) * 2000 * 2
    interleaved = ParallelConfig(world_size=4, pp=4, vpp=7)
    assert activation_bytes(model, run_config(), interleaved, 0) == (layer * (2 * 3 + 6 * 4 + 1) + work) * 2000 * 2
    # No more are in flight than the rank has: two micro-batches, and four where interleaving wants a multiple of PP.
    few = run_config(train={"batch_size": 4})
    kept = [activation_bytes(model, few, stages, stage) for stage in range(4)]
    assert kept == [(7 * layer * flight + work) * 2000 * 2 for flight in (2, 2, 2, 1)]
    assert activation_bytes(model, few, interleaved, 0) == (layer * 7 * 4 + work) * 1000 * 2


def test_a_micro_batch_is_no_larger_than_a_ranks_share_of_the_batch() -> None:
    model, ranks = PUBLISHED["Qwen2.5-7B-Instruct"], ParallelConfig(world_size=4)
    share = run_config(train={"batch_size": 8, "micro_batch_size": 2})
    for train in ({"micro_batch_size": 8}, {"max_tokens_per_micro_batch": 1_000_000}):
        wanted = run_config(train={"batch_size": 8, **train})
        assert head_bytes(model, wanted, ranks) == head_bytes(model, share, ranks)
        assert activation_bytes(model, wanted, ranks, 0) == activation_bytes(model, share, ranks, 0)


@pytest.mark.parametrize("packed", [False, True])
def test_the_batch_is_what_a_real_one_takes(packed: bool) -> None:
    model, length, count = tiny("qwen3_moe", num_layers=4, mlp_only_layers=[0]), 257, 4
    routes = np.broadcast_to(np.arange(2, dtype=np.uint8), (length - 1, 3, 2))
    mask = np.arange(length) > 50
    trajectories = [
        Trajectory(
            id=str(i),
            prompt_id=str(i),
            group_id=str(i),
            tokens=np.ones(length, np.int32),
            action_mask=mask,
            behavior_logprobs=np.where(mask, -1, 0).astype(np.float32),
            versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
            routed_experts=routes,
            reward=1.0,
        )
        for i in range(count)
    ]
    # Three layers have experts. One TP and CP rank's part.
    layout = BatchLayout(packed=packed, sequence_size=2, context_size=2)
    batch = build_micro_batch(trajectories, [1.0] * count, layout=layout, route_shape=RouteShape((0, 1, 2), 2, 8))
    parts = [vars(batch), *(vars(part) for part in (batch.routes, batch.rows) if part is not None)]
    real = sum(value.nbytes for part in parts for value in part.values() if isinstance(value, torch.Tensor))
    train = {"batch_size": count, "max_tokens_per_micro_batch": 10_000 if packed else None}
    config = run_config(train=train, rollout={"max_context": length, "max_new_tokens": 200})
    planned = batch_bytes(model, config, ParallelConfig(world_size=4, tp=2, cp=2), stage=0)
    assert real <= planned < 1.01 * real


def test_every_layout_listed_divides_the_model_and_the_ranks() -> None:
    layouts = legal_layouts(PUBLISHED["Qwen3-30B-A3B"], run_config(), 16)
    assert any((p.tp, p.ep, p.pp) == (4, 8, 2) for p in layouts)
    assert all(4 % p.tp == 0 and 48 % p.pp == 0 and 128 % p.ep == 0 for p in layouts)


def test_layouts_keep_what_else_the_configuration_says_and_are_those_that_the_trainer_accepts() -> None:
    """Against every combination, asked of the configuration and of Megatron-Core one by one."""
    device = replace(resolve_device("cpu"), kind="cuda")  # plans are for GPUs; gloo does not take every expert TP
    model = tiny("qwen3_moe", num_layers=4, mlp_only_layers=[0])
    kept = {"world_size": 8, "etp": 2, "vpp": 2, "distributed_optimizer": False}
    config = run_config(train={"batch_size": 2}, parallel=kept | {"pp": 2, "cp": 4})
    accepted = []
    for tensor, pipeline, context, expert in itertools.product((1, 2, 4, 8), repeat=4):
        sizes = {"tp": tensor, "pp": pipeline, "cp": context, "ep": expert}
        try:
            parallel = run_config(train={"batch_size": 2}, parallel=kept | sizes).parallel
            build_transformer_config(model, parallel, device, dtype=torch.float32)
        except (ValidationError, ConfigError):
            continue
        accepted.append(parallel)
    assert {p.dp for p in accepted} == {1, 2}
    assert legal_layouts(model, config, 8) == accepted


def test_a_layout_needs_the_same_in_the_list_and_on_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, own = CONFIGS["Qwen2.5-7B-Instruct"], {"world_size": 8, "distributed_optimizer": False}
    assert plan(tmp_path, model, parallel=own) == 0
    header, row = capsys.readouterr().out.splitlines()[-2:]
    assert header.split()[:5] == ["TP", "EP", "PP", "CP", "DP"]
    assert row.split()[:5] == ["1", "1", "1", "1", "8"]
    # 7.6 billion parameters with 12 bytes of optimizer state each, unsharded.
    assert row.split()[8] == f"{COUNTS['Qwen2.5-7B-Instruct'] * 12 / 1e9:.2f}"
    assert row.split()[-1] == "no"
    assert plan(tmp_path, model, "--gpus", "8", parallel=own) == 0
    assert row in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("gpus", "sections", "message"),
    [
        ("3", {"parallel": {"world_size": 2, "etp": 2}}, "ep x etp x pp = 2; change one"),
        (
            "4",
            {"parallel": {"world_size": 2, "etp": 2}},
            "etp=2: the model has no experts",
        ),
        ("1", {"parallel": {"world_size": 2, "pp": 2, "vpp": 2}}, "parallel.vpp=2 "),
        ("0", {}, "give at least 1"),
    ],
)
def test_gpus_that_no_layout_suits_are_refused_with_the_reason(
    gpus: str, sections: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, tiny_hf("qwen2", num_layers=4), "--gpus", gpus, **sections) == 1
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith(f"error: --gpus {gpus}: no TP, EP, PP and CP suit the model and the configuration; ")
    assert message in err


def plan(tmp_path: Path, model: Any, *arguments: str, **sections: Any) -> int:
    """Exit status of the command for a model without weights; ``sections`` change the configuration."""
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    run = run_config(**sections).model_dump(mode="json") | {"model": {"path": str(folder)}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run))
    return main(["plan", "--config", str(tmp_path / "run.yaml"), *arguments])


@pytest.mark.parametrize(
    ("family", "sections", "message"),
    [
        ("qwen3_moe", {"parallel": {"world_size": 4, "tp": 4}}, "parallel.tp=4 .* KV heads (2); choose"),
        ("qwen3_moe", {"parallel": {"world_size": 3, "pp": 3}}, "parallel.pp=3 .* layers (2); choose"),
        ("qwen3_moe", {"parallel": {"world_size": 3, "ep": 3}}, "parallel.ep=3 .* experts (8); choose"),
        ("qwen2", {"parallel": {"world_size": 2, "ep": 2}}, "parallel.ep=2.*no experts; set both to 1"),
        (
            "qwen3_moe",
            {"parallel": {"world_size": 2, "tp": 2, "sequence_parallel": False}},
            "parallel.sequence_parallel=false with parallel.tp=2.*leave it out",
        ),
        ("qwen2", {"train": {"moe_aux_loss_coeff": 0.01}}, "train.moe_aux_loss_coeff=0.01.*no experts.*set it to 0"),
    ],
)
def test_what_the_trainer_refuses_is_refused_with_its_error(
    family: Family, sections: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(tmp_path, tiny_hf(family), **sections) == 1
    out, err = capsys.readouterr()
    assert not out
    assert re.fullmatch(rf"error: .*{message.replace('(', '[(]').replace(')', '[)]')}.*\n", err)


def test_the_command_prints_each_layout_and_whether_it_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = {"micro_batch_size": 1, "recompute": "full"}
    rollout = {"max_context": 8192, "max_new_tokens": 4096}
    arguments = ("--gpus", "8", "--gpu-memory", "80")
    assert plan(tmp_path, CONFIGS["Qwen3-30B-A3B"], *arguments, train=train, rollout=rollout) == 0
    text = capsys.readouterr().out
    assert "30,532,122,624 parameters" in text
    assert "weight sync: 61.06 GB" in text
    # Keys and values of 48 layers, 4 heads of 128, in bfloat16; 64 runners.
    assert "KV cache 98,304 bytes a token, 51.54 GB for all runners at full length: does not fit at once;" in text
    verdicts = {line.split()[-1] for line in text.splitlines() if line.split()[-1] in ("yes", "no")}
    assert verdicts == {"yes", "no"}
    # 8 ranks with 16 experts each; 1.541 billion other parameters, whose 12 bytes of optimizer state 8 ranks share;
    # inputs of 48 layers and one layer in its backward, 8192 tokens; logits of 4096; 16 trajectories with their routes.
    row = next(line.split() for line in text.splitlines() if line.split()[:5] == ["1", "8", "1", "1", "8"])
    assert row[5:10] == ["5,164,972,032", "10.33", "20.66", "45.80", "2.98"]
    assert row[10:] == ["2.03", "0.06", "81.86", "no"]


@pytest.mark.parametrize(
    ("memory", "runners", "verdict"),
    [
        ("80", 64, "does not fit at once; runners will wait for room"),
        ("80", 8, "fits"),
        ("68", 64, "weights and one trajectory do not fit; raise rollout.engine_tp"),
    ],
)
def test_an_engine_fits_with_all_runners_with_some_or_not_at_all(
    memory: str, runners: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = {"max_context": 8192, "max_concurrent_trajectories": runners}  # 0.8 GB each, beside 61 GB of weights
    assert plan(tmp_path, CONFIGS["Qwen3-30B-A3B"], "--gpu-memory", memory, rollout=rollout) == 0
    assert capsys.readouterr().out.splitlines()[2].endswith(f": {verdict}")
