"""The command line: ``megatron-fr train | eval | plan | report | doctor``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence

from megatron_fr import __version__
from megatron_fr.errors import MegatronFRError
from megatron_fr.runtime.access import private_files
from megatron_fr.runtime.console import print_any_text


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; errors made on purpose are printed as one line without a traceback."""
    parser = argparse.ArgumentParser(prog="megatron-fr", description=__doc__)
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, purpose in (
        ("train", "train on this machine: engines, rollout service and trainer ranks"),
        ("eval", "evaluate model.path on the held-out prompts and print the result as JSON"),
        ("plan", "print the memory of each GPU in each layout"),
    ):
        command = commands.add_parser(name, help=purpose, description=purpose)
        command.add_argument("--config", required=True, help="YAML file of the run")
        command.add_argument("overrides", nargs="*", help="section.field=value")
    # The last one is the plan's.
    command.add_argument("--gpus", type=int, help="trainer GPUs: list every legal layout (default: the file's own)")
    command.add_argument("--gpu-memory", type=float, default=80, help="memory of one GPU in 10^9 bytes (default: 80)")
    report = commands.add_parser("report", help="summarise a run and redraw its picture")
    report.add_argument("run_dir", help="the run's output folder")
    commands.add_parser("doctor", help="check this machine and environment")
    arguments = parser.parse_args(argv)
    print_any_text()
    private_files()
    try:
        # Imported where needed: a report must not wait for torch and SGLang.
        if arguments.command == "report":
            from megatron_fr.observe.report import report_run

            print(report_run(arguments.run_dir))
            return 0
        if arguments.command == "doctor":
            from megatron_fr.cli import doctor

            return doctor.run()
        from megatron_fr.config import load_config
        from megatron_fr.config.paths import check_inputs

        config = load_config(arguments.config, arguments.overrides)
        if arguments.command == "plan":
            from megatron_fr.cli.plan import render

            print(render(config, arguments.gpus, arguments.gpu_memory))
            return 0
        check_inputs(config)
        if arguments.command == "eval":
            from megatron_fr.cli.evaluate import evaluate_model

            print(json.dumps(asyncio.run(evaluate_model(config))))
            return 0
        from megatron_fr.cli.train import Supervisor

        return Supervisor(config).run()
    except MegatronFRError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
