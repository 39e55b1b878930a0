"""What users of Hugging Face's libraries expect of one more: verbosity, exit codes, types, help."""

import logging
import os
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import pytest

import trl_atropos
from tests.launching import heed_ctrl_c
from tests.rollout_factory import arguments
from trl_atropos import AtroposGRPOConfig
from trl_atropos import logging as verbosity
from trl_atropos.cli import COMMANDS
from trl_atropos.errors import ServerError, ServerTimeout, ServiceError
from trl_atropos.recipe import PARTS, ServicesConfig, _Parser
from trl_atropos.run_messages import message_of, print_help, show_warning
from trl_atropos.services.manager import Services
from trl_atropos.train import set_up_logging

SPEAK = """
import logging
{first}
import trl_atropos
{then}
log = logging.getLogger("trl_atropos.metrics.health")
for level in ("debug", "info", "warning", "error"):
    getattr(log, level)("a %s", level)
"""


def spoken(first: str = "", then: str = "", variable: str | None = None) -> list[str]:
    """What a program's stderr has that calls the package's logger at four levels."""
    env = {name: value for name, value in os.environ.items() if name != verbosity.VARIABLE}
    env |= {verbosity.VARIABLE: variable} if variable else {}
    program = SPEAK.format(first=first, then=then)
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and done.stdout == "", done.stderr
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("then", "variable", "levels"),
    [
        ("", None, ["warning", "error"]),
        ("", "info", ["info", "warning", "error"]),
        ("", "ERROR", ["error"]),
        ("", "critical", []),
        ("trl_atropos.logging.set_verbosity_debug()", None, ["debug", "info", "warning", "error"]),
        ("trl_atropos.logging.set_verbosity_error()", "info", ["error"]),
        ("trl_atropos.logging.set_verbosity(logging.INFO)", None, ["info", "warning", "error"]),
    ],
)
def test_verbosity_is_set_by_variable_or_program(then, variable, levels):
    assert spoken(then=then, variable=variable) == [f"[trl_atropos] a {level}" for level in levels]


def test_unknown_verbosity_is_named_with_all_levels():
    first, *others = spoken(variable="loud")
    assert first == (
        "[trl_atropos] TRL_ATROPOS_VERBOSITY is 'loud', which is no level. Set it to one of: "
        "debug, info, warning, error, critical."
    )
    assert others == ["[trl_atropos] a warning", "[trl_atropos] a error"]


def test_programs_own_handler_gets_each_record_once():
    own = "logging.basicConfig(format='mine: %(message)s')"
    assert spoken(first=own) == ["mine: a warning", "mine: a error"]
    ours = spoken(first=own, then="trl_atropos.logging.disable_propagation()")
    assert ours == ["[trl_atropos] a warning", "[trl_atropos] a error"]


@pytest.mark.parametrize(
    ("setting", "variable", "level"),
    [("passive", None, "INFO"), ("passive", "error", "ERROR"), ("warning", "debug", "WARNING")],
)
def test_main_job_logs_info_by_default(setting, variable, level, tmp_path, monkeypatch):
    monkeypatch.delenv(verbosity.VARIABLE, raising=False)
    if variable:
        monkeypatch.setenv(verbosity.VARIABLE, variable)
    package = logging.getLogger("trl_atropos")
    before = package.level
    try:
        package.setLevel(verbosity.verbosity_of_environment() or logging.NOTSET)  # as on import
        set_up_logging(AtroposGRPOConfig(**arguments(tmp_path, log_level=setting)))
        assert logging.getLevelName(verbosity.get_verbosity()) == level
    finally:
        package.setLevel(before)
        verbosity.enable_propagation()


def raised_after(first: Exception, then: Exception) -> Exception:
    """An error that was raised while another one was handled."""
    try:
        try:
            raise first
        finally:
            raise then
    except Exception as error:  # noqa: BLE001
        return error


def test_hung_server_is_reported():
    ended = ServiceError("vllm ended with exit code 1")
    assert (
        message_of(raised_after(ServerTimeout("no answer within 60 s"), ended))
        == "no answer within 60 s"
    )
    assert (
        message_of(raised_after(ServerError("the connection broke"), ended))
        == "vllm ended with exit code 1"
    )
    assert message_of(raised_after(ended, OSError("a pipe broke"))) == "vllm ended with exit code 1"
    assert message_of(ValueError("a mistake in the code")) is None


def cli(*words: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "trl_atropos.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["bench", "--help"], 0),
        ([], 2),
        (["trane"], 2),
        (["bench"], 2),
        (["bench", "wheels"], 2),
        (["check"], 2),
        (["report"], 2),
        (["serve"], 2),
        (["report", "no/such/folder"], 1),
    ],
)
def test_exit_codes_tell_wrong_use_from_failure(words, code):
    status, out, err = cli(*words)
    assert status == code and "Traceback" not in err
    assert (out or err).strip()


@pytest.mark.parametrize("command", ["train", "check", "try", "eval", "init", "slurm"])
def test_command_without_words_says_what_is_missing(command):
    status, out, err = cli(command)
    assert (status, out) == (2, "")
    usage, error = err.splitlines()
    assert usage.startswith(f"usage: trl-atropos {command} ")
    assert error.startswith(f"trl-atropos {command}: error: name a ")


@pytest.mark.parametrize(("typed", "meant"), [("trian", "train"), ("chekc", "check")])
def test_mistyped_command_is_corrected(typed, meant):
    status, out, err = cli(typed, "recipe.yaml")
    assert (status, out) == (2, "")
    assert err == f"trl-atropos: unknown command {typed!r}. Did you mean `{meant}`?\n"


def test_help_has_every_command():
    told = cli("--help")[1]
    assert all(f"\n    {name} " in told for name in COMMANDS)


def test_version_is_the_packages():
    assert cli("--version")[1] == f"trl_atropos {trl_atropos.__version__}\n"


def test_ctrl_c_ends_a_command_with_130(tmp_path):
    program = (
        "import signal, sys\nimport trl_atropos.report.page as page\nfrom trl_atropos import cli\n"
    )
    program += "page.main = lambda words: signal.raise_signal(signal.SIGINT)\n"  # to this thread
    program += "sys.argv = ['trl-atropos', 'report', 'x']\ncli.main()"
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=heed_ctrl_c,
    )
    assert (done.returncode, done.stderr) == (130, "")


def test_main_jobs_help_has_every_setting(
    capsys,
):
    print_help()
    told = capsys.readouterr().out
    own = [*AtroposGRPOConfig.__annotations__, *(field.name for field in fields(ServicesConfig))]
    assert all(f"\n  --{name} " in told for name in own)
    assert len(told.splitlines()) < 250 and "--adam_beta1" not in told
    listed = told.partition("Those that most runs set: ")[2].partition(". `--help_all`")[0]
    names = {field.name for part in PARTS for field in fields(part)}
    assert set(listed.replace("\n", " ").replace(",", " ").split()) <= names


def test_help_of_every_setting_can_be_formatted():
    told = " ".join(_Parser(PARTS).format_help().split())
    assert "--adam_beta1" in told and "at most 2 percent of the run's time" in told


def test_warnings_of_libraries_are_plain(capsys):
    show_warning(UserWarning("`top_p` has no effect"), UserWarning, "config.py", 553)
    assert capsys.readouterr().err == "warning: `top_p` has no effect\n"


def test_services_get_hugging_faces_variables_alone(tmp_path, monkeypatch):
    ours = {
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": "/models",
        "TRANSFORMERS_VERBOSITY": "error",
        "WANDB_MODE": "offline",
    }
    for name, value in {**ours, "RANK": "3", "MASTER_ADDR": "elsewhere"}.items():
        monkeypatch.setenv(name, value)
    told = tmp_path / "told"
    with Services(tmp_path) as services:
        services.start(
            "teller", ["sh", "-c", f"env > {told}.part && mv {told}.part {told} && sleep 60"]
        )
        deadline = time.monotonic() + 30
        while not told.exists():
            assert time.monotonic() < deadline, (tmp_path / "teller.log").read_text()
            time.sleep(0.05)
    variables = dict(line.partition("=")[::2] for line in told.read_text().splitlines())
    assert ours.items() <= variables.items() and not {"RANK", "MASTER_ADDR"} & set(variables)


def test_public_names_and_types_are_shipped():
    assert all(getattr(trl_atropos, name) is not None for name in trl_atropos.__all__)
    assert Path(trl_atropos.__file__).with_name("py.typed").is_file()
