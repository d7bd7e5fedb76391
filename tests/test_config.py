"""Loading, overriding, checking and writing configurations."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from megatron_fr.config.load import RunConfig, load_config, save_config
from megatron_fr.config.read_yaml import parse_yaml
from megatron_fr.config.sections import EvaluationSet, FlashReinforceConfig, GRPOConfig, OwnLossConfig
from megatron_fr.errors import ConfigError

MINIMAL = {
    "model": {"path": "some/model"},
    "train": {"num_updates": 10, "batch_size": 16},
    "reward": {"function": "package.module:function"},
    "data": {"train": "train.jsonl"},
}

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.fixture
def load(tmp_path):
    """Loads the minimal configuration with sections merged in and overrides applied."""

    def run(*overrides, **sections):
        path = tmp_path / "run.yaml"
        merged = dict(MINIMAL)
        for name, value in sections.items():
            merged[name] = {**MINIMAL.get(name, {}), **value} if isinstance(value, dict) else value
        path.write_text(yaml.safe_dump(merged))
        return load_config(path, overrides)

    return run


def refusal(load, *overrides, **sections):
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **sections)
    return str(caught.value)


def test_the_defaults_are_the_published_method(load):
    config = load()
    algorithm = config.algorithm
    assert isinstance(algorithm, FlashReinforceConfig)
    assert (algorithm.advantage, algorithm.reduction, algorithm.admission, algorithm.importance) == (
        "batch_mean", "sample_mean", "sequence", "token",
    )  # fmt: skip
    assert algorithm.failure_token_quantile == 1
    assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.clip_grad) == (1e-6, 0.1, 1.0)
    assert (config.rollout.temperature, config.rollout.top_p) == (1, 1)


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("trian.batch_size=4", "trian={'batch_size': 4}: unknown field; did you mean 'train'?"),
        ("train.batchsize=4", "train.batchsize=4: unknown field; did you mean 'batch_size'?"),
        ("agent.tool.timeout=4", "agent.tool.timeout=4: unknown field; did you mean 'timeout_s'?"),
        ("algorithm.detla=0.1", "algorithm.detla=0.1: unknown field; did you mean 'delta'?"),
        ("sync.zzz=1", "known fields: bucket_mb, folder, max_probe_difference, probe_tokens, timeout_s, transport"),
    ],
)
def test_a_typo_is_an_error_that_names_the_field_meant(load, override, remedy):
    assert remedy in refusal(load, override)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["algorithm.advantage=group"], "algorithm.group_size=1: groups need advantage=group and group_size of 2"),
        (["algorithm.group_size=4"], "algorithm.advantage='batch_mean' with algorithm.group_size=4"),
        (["algorithm.advantage=mean"], "algorithm.advantage='mean' is unknown; choose one of batch_mean, "),
        (["reward.function=null"], "agent.kind='python_tool' returns no reward; set reward.function"),
        (
            ["data.eval=a.jsonl", "evaluation.sets.b.data=b.jsonl"],
            "data.eval='a.jsonl' and evaluation.sets=b are both given; move data.eval into evaluation.sets",
        ),
        (["evaluation.sets={a/b: {data: x.jsonl}}"], "evaluation.sets: 'a/b' is no name"),
        (["agent.chat_template_kwargs={tools: []}"], "agent.chat_template_kwargs sets tools"),
        (["algorithm=grpo", "train.batch_size=12"], "train.batch_size=12 is not a multiple of algorithm.group_size=8"),
        (["rollout.max_new_tokens=8192"], "leaves no room for a prompt in rollout.max_context=8192"),
        (["sync.probe_tokens=8192"], "leaves no room for a prompt in rollout.max_context=8192; lower the first"),
        (
            ["checkpoint={keep_best: 1, every: 10}", "evaluation.every=7", "data.eval=eval.jsonl"],
            "checkpoint.every=10 and evaluation.every=7 evaluates few of the updates that it saves; make one of the",
        ),
        (["parallel.world_size=6", "parallel.tp=4"], "not a multiple of tp x pp x cp = 4"),
        (["parallel.world_size=2", "parallel.ep=4"], "not a multiple of ep x etp x pp = 4"),
        (
            ["train.batch_size=1"],
            "train.batch_size=1: rewards of a batch of one are all equal, so no update would step",
        ),
        (
            ["train.batch_size=1", "train.skip_without_signal=false", "algorithm.advantage=leave_one_out"],
            "train.batch_size=1 with algorithm.advantage='leave_one_out': compares a reward with itself",
        ),
        (["parallel.world_size=32"], "train.batch_size=16 gives some of the 32 data-parallel ranks no trajectory"),
    ],
)
def test_a_contradiction_is_refused_with_both_values_and_the_remedy(load, overrides, reason):
    assert reason in refusal(load, *overrides)


@pytest.mark.parametrize(("saved", "scored"), [(10, 10), (10, 5), (5, 10)])
def test_the_best_can_be_kept_where_every_evaluation_or_every_checkpoint_has_the_other(load, saved, scored):
    every = [f"checkpoint.every={saved}", f"evaluation.every={scored}"]
    assert load("checkpoint.keep_best=1", "data.eval=eval.jsonl", *every).checkpoint.keep_best == 1


@pytest.mark.parametrize("override", ["rollout.top_p=0.9", "rollout.top_k=50", "rollout.min_p=0.05"])
def test_sampling_below_full_support_is_refused_with_the_reason(load, override):
    text = refusal(load, override)
    assert override in text
    assert "importance ratios against it are wrong" in text


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.delta=-1", "algorithm.failure_token_quantile=0", "algorithm.failure_token_quantile=1.5",
        "optimizer.lr=0", "optimizer.lr=.nan", "optimizer.lr=.inf", "train.num_updates=0", "train.batch_size=many",
        "rollout.temperature=0", "rollout.engine_port=70000", "algorithm.reduction=mean", "model.dtype=float16",
        "seed=-1", "rollout.max_policy_lag=-1",
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_refused_by_its_full_name(load, override):
    assert override.split("=")[0] + "=" in refusal(load, override)


def test_all_problems_are_listed_at_once(load):
    text = refusal(load, "train.batchsize=4", "optimizer.lr=-1", "model=null")
    assert all(name in text for name in ("train.batchsize", "optimizer.lr", "model"))


def test_a_missing_required_field_is_named(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({k: v for k, v in MINIMAL.items() if k != "data"}))
    with pytest.raises(ConfigError, match="data: required, and not given"):
        load_config(path)


def test_overrides_are_yaml_and_reach_any_depth(load):
    config = load(
        "train.batch_size=32", "optimizer.lr=1e-5", "agent.tool.timeout_s=2.5", "agent.system_prompt=null",
        "data.eval=eval.jsonl", "--rollout.engine_args={tp-size: 2, log-level: warning}", "output=runs/x=y",
        "train.skip_without_signal=false",
    )  # fmt: skip
    assert config.train.batch_size == 32
    assert config.optimizer.lr == 1e-5
    assert config.agent.tool.timeout_s == 2.5
    assert config.agent.system_prompt is None
    assert config.data.eval == "eval.jsonl"
    assert config.rollout.engine_args == {"tp-size": 2, "log-level": "warning"}
    assert config.output == Path("runs/x=y")
    assert config.train.skip_without_signal is False


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("train.batch_size", "expected section.field=value"),
        ("=3", "expected section.field=value"),
        ("seed.deep=3", "unknown field|seed"),
        ("model.path.deep=3", "model.path is a value, not a section"),
        ("output={", "not valid YAML"),
    ],
)
def test_a_malformed_override_is_quoted(load, override, reason):
    text = refusal(load, override)
    assert any(part in text for part in reason.split("|"))


@pytest.mark.parametrize("value", ["off", "on", "yes", "no", "Off", "y", "1:30", "2024-01-01"])
def test_only_true_and_false_are_truth_values_and_the_rest_stays_text(load, value):
    assert load(f"model.path={value}").model.path == value
    assert load(f"rollout.engine_args={{x: {value}}}").rollout.engine_args == {"x": value}


@pytest.mark.parametrize("field", ["admission", "importance"])
def test_off_is_a_value_in_overrides_and_files(load, tmp_path, field):
    assert getattr(load(f"algorithm.{field}=off", "algorithm.admission=off").algorithm, field) == "off"
    path = tmp_path / "written.yaml"
    path.write_text(yaml.safe_dump(MINIMAL) + "algorithm:\n  admission: off\n  importance: off\n")
    assert getattr(load_config(path).algorithm, field) == "off"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-6", 1e-6), ("010", 10), ("0x1F", 31), ("0o17", 15), ("-.5", -0.5), ("~", None), ("true", True), ("'1'", "1")],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = parse_yaml(text, "x")
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("text", ["off", "1e-6", "0o17", "089", "1:30", "~", "<<", "true", "é", "", "2024-01-01"])
def test_text_that_looks_like_something_else_survives_a_saved_configuration(load, tmp_path, text):
    config = load().model_copy(update={"rollout": load().rollout.model_copy(update={"engine_args": {text: text}})})
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config
    assert yaml.safe_load((tmp_path / "saved.yaml").read_text())["rollout"]["engine_args"] == {text: text}


def test_a_repeated_key_is_refused_with_both_lines(load, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\ntrain:\n  batch_size: 1\n  num_updates: 3\n  batch_size: 2\n")
    with pytest.raises(ConfigError, match="'batch_size' is on line 3 and again on line 5; keep one"):
        load_config(path)
    assert "the key 'a' is on line 1 and again on line 1" in refusal(load, "rollout.engine_args={a: 1, a: 2}")


@pytest.mark.parametrize("override", ["train.batch_size=true", "optimizer.lr=true", "seed=false"])
def test_a_truth_value_is_no_number(load, override):
    name = override.split("=")[0]
    assert f"{name}=" in refusal(load, override)
    assert "input should be a valid" in refusal(load, override)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16"])
def test_a_file_that_is_not_utf_8_is_one_clear_line(tmp_path, encoding):
    path = tmp_path / "run.yaml"
    path.write_bytes("output: runs/größer\n".encode(encoding))
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte \d+ is 0x\w\w\); save it as UTF-8") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"a: \x00", b"seed: " + b"9" * 5000, b"[" * 5000, b"a: b: c"])
def test_a_damaged_file_is_one_clear_line(tmp_path, content):
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="is not valid YAML") as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_the_locale_does_not_matter(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"output": "runs/größer"}, allow_unicode=True), encoding="utf-8")
    code = f"from megatron_fr.config import load_config; print(ascii(load_config({str(path)!r}).output.name))"
    environment = {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "'gr\\xf6\\xdfer'\n"


README_RUNS = [
    shlex.split(line.split("launch/local.sh")[1], comments=True)
    for line in (ROOT / "README.md").read_text().splitlines()
    if line.startswith("bash launch/local.sh") and "=" in line
]


@pytest.mark.parametrize("overrides", README_RUNS, ids=" ".join)
def test_the_examples_of_the_readme_load(overrides):
    load_config(ROOT / "configs/tiny_python_tool.yaml", overrides)


def test_grpo_is_chosen_by_its_name_alone_and_takes_its_own_fields(load):
    for config in (
        load("algorithm=grpo", "algorithm.group_size=4"),
        load("algorithm.group_size=4", algorithm="grpo"),
        load(algorithm={"name": "grpo", "group_size": 4}),
    ):
        assert config.algorithm == GRPOConfig(group_size=4)
        assert config.max_policy_lag == 0
    assert load("algorithm=grpo", "rollout.max_policy_lag=1").max_policy_lag == 1
    assert load().max_policy_lag == 4
    assert "algorithm.delta=0.1: unknown field" in refusal(load, "algorithm=grpo", "algorithm.delta=0.1")
    assert "'ppo'" in refusal(load, "algorithm=ppo")


def test_a_loss_of_ones_own_is_chosen_by_naming_it_and_takes_no_setting_of_the_built_in_ones(load):
    config = load("algorithm.loss=mine:loss", "algorithm.loss_args.clip=0.1", "algorithm.advantage=mine:advantage")
    assert config.algorithm == OwnLossConfig(loss="mine:loss", loss_args={"clip": 0.1}, advantage="mine:advantage")
    assert config.max_policy_lag == 4
    assert "algorithm.delta=0.1: unknown field" in refusal(load, "algorithm.loss=mine:loss", "algorithm.delta=0.1")
    assert load("algorithm.advantage=mine:advantage", "algorithm.group_size=2").algorithm.group_size == 2


def test_an_agent_of_ones_own_may_return_the_reward(load):
    assert load("agent.kind=mine:Agent", "reward.function=null").reward.function is None


def test_evaluation_sets_take_what_they_leave_out_from_the_section(load):
    simple = load("data.eval=a.jsonl", "data.eval_split=dev", "evaluation.samples=2").evaluation_sets
    assert simple == {"": EvaluationSet(data="a.jsonl", split="dev", num_prompts=128, samples=2, temperature=1.0)}
    sets = load("evaluation={temperature: 0.6, sets: {b: {data: b.jsonl, temperature: 0}, a: {data: a.jsonl}}}")
    assert list(sets.evaluation_sets) == ["b", "a"]
    assert [one.temperature for one in sets.evaluation_sets.values()] == [0, 0.6]
    assert load().evaluation_sets == {}
    text = refusal(load, "evaluation.sets.a={data: a.jsonl, sample: 3}")
    assert "evaluation.sets.a.sample=3: unknown field; did you mean 'samples'?" in text


def test_group_advantages_need_no_grpo(load):
    config = load("algorithm.advantage=group", "algorithm.group_size=4")
    assert config.algorithm.name == "flash_reinforce"
    assert config.max_policy_lag == 4


@pytest.mark.parametrize(
    "overrides", [[], ["algorithm=grpo"], ["algorithm.admission=token", "rollout.engine_args.tp-size=2", "seed=7"]]
)
def test_a_saved_configuration_loads_as_the_same(load, tmp_path, overrides):
    config = load(*overrides)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_a_loaded_configuration_cannot_be_changed(load):
    with pytest.raises(ValidationError, match="frozen"):
        load().train.batch_size = 3


def test_files_that_are_no_configuration_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    path = tmp_path / "run.yaml"
    for content, reason in (
        ("- a\n- b\n", "holds list, expected a mapping"),
        ("a: [", "not valid YAML"),
        ("", "NoneType"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match=reason):
            load_config(path)


def test_data_parallelism_takes_what_the_other_dimensions_leave(load):
    parallel = load("parallel.world_size=16", "parallel.tp=2", "parallel.pp=2", "parallel.ep=4").parallel
    assert parallel.dp == 4


def test_every_field_has_its_line_of_documentation():
    def undocumented(model, prefix=""):
        for name, field in model.model_fields.items():
            if not field.description and not (
                hasattr(field.annotation, "model_fields") or name in ("name", "algorithm")
            ):
                yield prefix + name
            if hasattr(field.annotation, "model_fields"):
                yield from undocumented(field.annotation, f"{prefix}{name}.")

    for model in (RunConfig, FlashReinforceConfig, GRPOConfig, OwnLossConfig, EvaluationSet):
        assert list(undocumented(model)) == []


@pytest.mark.parametrize("path", RECIPES, ids=[path.name for path in RECIPES])
def test_every_recipe_loads_and_stays_short(path):
    load_config(path)
    assert len(path.read_text().splitlines()) < 60
