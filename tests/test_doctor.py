"""The doctor's checks, on this machine and on broken ones."""

import os
import subprocess
import sys

import pytest

from megatron_fr.cli import doctor


@pytest.mark.slow
def test_a_healthy_installation_is_reported_ready_with_a_line_a_check():
    result = subprocess.run(
        [sys.executable, "-c", "import sys; from megatron_fr.cli import doctor; sys.exit(doctor.run())"],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout
    assert lines[-1] == "ready"
    assert len(lines) == len(doctor.CHECKS) + 1
    assert {line[17:26].strip() for line in lines[:-1]} <= {"ok", "note", "warning"}
    assert any(line.startswith("megatron-core    ok       attention imports") for line in lines)
    assert any(line.startswith("sglang platform  ok       plugin found") for line in lines)


def test_something_broken_makes_the_exit_code_1_and_is_named(monkeypatch, capsys):
    broken = doctor.Finding("engine", "broken", "no wheels")
    monkeypatch.setattr(doctor, "CHECKS", (doctor.check_python, lambda: broken))
    assert doctor.run() == 1
    assert capsys.readouterr().out.splitlines()[1:] == ["engine           broken   no wheels", "broken: engine"]


def test_versions_other_than_pinned_and_absent_ones_are_warned_about(tmp_path):
    pins = tmp_path / "constraints.txt"
    pins.write_text("# comment with == in it\npytest==0.0.1\nno-such-package-here==1.0\n")
    finding = doctor.check_packages(pins)
    assert finding.status == "warning"
    assert f"1 differ: pytest {pytest.__version__} (pinned 0.0.1)" in finding.detail
    assert "1 absent: no-such-package-here" in finding.detail
    pins.write_text(f"pytest=={pytest.__version__}\n")
    assert doctor.check_packages(pins).status == "ok"
    assert doctor.check_packages(tmp_path / "none").status == "note"


def test_a_missing_required_package_is_broken(monkeypatch):
    monkeypatch.setattr(doctor, "REQUIRED", ("pytest", "no-such-package-here"))
    finding = doctor.check_packages()
    assert (finding.status, finding.detail) == ("broken", "not installed: no-such-package-here; run launch/env.sh")


def test_an_import_that_dies_is_broken_with_its_last_line():
    finding = doctor.try_import("x", "raise OSError('libcuda.so.1: cannot open')", "{}")
    assert finding == doctor.Finding("x", "broken", "OSError: libcuda.so.1: cannot open")
    assert "code -9" in doctor.try_import("x", "import os; os.kill(os.getpid(), 9)", "{}").detail
    assert doctor.try_import("x", "print('noise'); print('3.1')", "version {}").detail == "version 3.1"


def test_an_import_that_hangs_is_broken():
    finding = doctor.try_import("x", "import time; time.sleep(60)", "{}", timeout_s=0.5)
    assert (finding.status, "more than 0.5 s" in finding.detail) == ("broken", True)


def test_a_project_that_is_not_installed_has_no_plugin(monkeypatch):
    monkeypatch.setattr(doctor, "PLATFORM_NAME", "another_name")
    finding = doctor.check_sglang_plugin()
    assert finding.status == "broken"
    assert "no entry point 'another_name'" in finding.detail


def test_little_memory_and_disk_are_warned_about(tmp_path):
    assert doctor.check_memory(int(2e9)).status == "warning"
    assert doctor.check_memory(int(64e9)) == doctor.Finding("memory", "ok", "64 GB free")
    assert doctor.check_disk(tmp_path, int(3e9)).status == "warning"
    assert doctor.check_disk(tmp_path, int(300e9)).status == "ok"


def test_slurm_is_found_on_the_path_and_its_failure_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.check_slurm().status == "note"
    sbatch = tmp_path / "sbatch"
    sbatch.write_text("#!/bin/sh\necho slurm 22.05.8\n")
    sbatch.chmod(0o755)
    assert doctor.check_slurm() == doctor.Finding("slurm", "ok", "slurm 22.05.8")
    sbatch.write_text("#!/bin/sh\necho no controller >&2\nexit 1\n")
    assert doctor.check_slurm() == doctor.Finding("slurm", "warning", f"{sbatch} fails: no controller")


def test_a_driver_without_a_usable_torch_is_broken(monkeypatch, tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'GPU 0: H200'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "gpu_names", list)
    assert doctor.check_gpu().status == "broken"
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert doctor.check_gpu().status == "note"
