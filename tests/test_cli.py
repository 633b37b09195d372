import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

import pearl
from composer.matrix import AssignmentMatrix
from composer.placement import Placement
from composer.platform import Platform
from pearl.backends.sycl import runtime as sycl_runtime
from pearl.cli import app
from pearl.runtime.entry import DEBUG_VARIABLE

ROOT = Path(__file__).parent.parent

SPEC = """
[actors]
env = "CartPole-v1"
envs_per_actor = 4
[trainer]
class = "pearl.algorithms:DQN"
hidden_sizes = [16]
[replay]
size = 1000
[training]
batch_size = 32
learning_starts = 100
[program]
timesteps = 400
"""

# Stands for a program: says what it was given, and how it ends.
STUB = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(__file__).parent
(folder / "seen.json").write_text(json.dumps(sys.argv[1:]))
(folder / "debug").write_text(os.environ.get("PEARL_DEBUG", ""))
if "--wait" in sys.argv:
    def stop(number, frame):
        time.sleep(0.5)  # a checkpoint
        (folder / "stopped").write_text(str(number))
        sys.exit(128 + number)
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGHUP, stop)
    (folder / "ready").touch()
    time.sleep(60)
if "--bench" in sys.argv:
    run_dir = pathlib.Path(sys.argv[sys.argv.index("--run-dir") + 1])
    rates = {"program": "stub", "predicted_eps": 1000.0, "measured_eps": 900.0}
    rates |= {"overall_eps": 800.0, "overall_gps": 12.5}
    (run_dir / "bench.json").write_text(json.dumps(rates))
sys.exit(7 if "--fail" in sys.argv else 0)
"""


def pearl_command(*arguments, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.getenv("PYTHONPATH")]))}
    command = [sys.executable, "-m", "pearl", *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, **options)


def invoke(*arguments):
    # `--debug` sets the variable for the program that it starts; here it must not outlive the command.
    return CliRunner(env={DEBUG_VARIABLE: None}).invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def stub(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(STUB)
    return path


@pytest.fixture(scope="module")
def composed(tmp_path_factory, quick_profiles):
    """A small composition."""
    folder = tmp_path_factory.mktemp("composed")
    (folder / "small.toml").write_text(SPEC)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEARL_CACHE_DIR", str(folder / "cache"))
        result = invoke("compose", folder / "small.toml")
        assert result.exit_code == 0, result.output
        yield folder, result.stdout


# --- help and errors ------------------------------------------------------------------------------------------------


def test_help_in_a_process_of_its_own_loads_no_torch():
    code = "import sys; sys.argv = ['pearl', '--help']\nfrom pearl.cli import main\ntry:\n    main()\n"
    code += (
        "finally:\n    print('loaded', [m for m in ('torch', 'pandas', 'gymnasium', 'composer') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert "loaded []" in done.stdout
    with pearl_command("--help", stdout=subprocess.PIPE) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    for command in ("devices", "compose", "explain", "run", "bench", "report", "portability"):
        assert command in output


@pytest.mark.parametrize("command", ["devices", "compose", "explain", "run", "bench", "report", "portability"])
def test_every_command_explains_itself(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"pearl {command}" in result.output
    assert "Examples:" in result.output


def test_version():
    result = invoke("--version")
    assert result.output == f"pearl {pearl.__version__}\n"


def test_no_command_shows_help():
    assert "Usage" in invoke().output


def test_an_error_is_one_message_and_debug_adds_the_traceback(tmp_path):
    result = invoke("report", tmp_path / "absent")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("Error: There is no folder")
    assert "Traceback" not in result.stderr
    result = invoke("--debug", "report", tmp_path / "absent")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert "Error: There is no folder" in result.stderr


# --- devices --------------------------------------------------------------------------------------------------------


def test_devices_writes_files_that_the_composer_reads(tmp_path):
    folder = tmp_path / "new" / "machine"
    result = invoke("devices", "--no-measure", "--output-dir", tmp_path / "new", "--devices", "machine/devices.csv")
    assert result.exit_code == 0, result.output
    platform = Platform.from_files(folder / "devices.csv", tmp_path / "new" / "connections.csv")
    assert platform.host.name == "cpu0"
    for text in ("Host CPU", "caches", "ISA", "cpu0", "unavailable", str(folder / "devices.csv")):
        assert text in result.stdout


def test_devices_measures(tmp_path):
    result = invoke("devices", "--output-dir", tmp_path, "--devices", "d.csv", "--connections", "c.csv")
    assert result.exit_code == 0, result.output
    platform = Platform.from_files(tmp_path / "d.csv", tmp_path / "c.csv")
    assert platform.host.memory_bandwidth_gbps > 0.1


def test_devices_overwrites_only_when_told(tmp_path):
    (tmp_path / "devices.csv").write_text("mine")
    result = invoke("devices", "--no-measure", "--output-dir", tmp_path)
    assert result.exit_code == 1
    assert "--force" in result.stderr
    assert (tmp_path / "devices.csv").read_text() == "mine"
    assert not (tmp_path / "connections.csv").exists()
    assert invoke("devices", "--no-measure", "--output-dir", tmp_path, "--force").exit_code == 0
    assert (tmp_path / "devices.csv").read_text().startswith("name,")


def test_devices_refuses_one_name_for_both_files(tmp_path):
    result = invoke("devices", "--output-dir", tmp_path, "--devices", "x.csv", "--connections", "x.csv")
    assert result.exit_code == 1
    assert "other names" in result.stderr


def test_devices_says_where_it_cannot_write(tmp_path):
    (tmp_path / "file").touch()
    result = invoke("devices", "--no-measure", "--output-dir", tmp_path / "file" / "below")
    assert result.exit_code == 1
    assert "cannot be made" in result.stderr
    (tmp_path / "connections.csv").mkdir()
    result = invoke("devices", "--output-dir", tmp_path, "--force")
    assert result.exit_code == 1
    assert "it is a folder" in result.stderr
    assert not (tmp_path / "devices.csv").exists()


def shown_by_devices(folder, **environment):
    command = [sys.executable, "-m", "pearl", "devices", "--no-measure", "--output-dir", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.sycl
def test_devices_lists_sycl_and_says_how_to_add_the_emulator(tmp_path):
    shown = shown_by_devices(tmp_path, PEARL_FPGA_EMULATOR=str(tmp_path / "absent"), OCL_ICD_FILENAMES="")
    assert "usable (is cpu0)" in shown
    assert re.search(r"^No FPGA: .* pearl devices --setup-fpga-emulator$", shown, re.MULTILINE)
    assert re.search(r"^No Intel GPU: ", shown, re.MULTILINE) or "sycl:gpu0" in shown
    platform = Platform.from_files(tmp_path / "devices.csv", tmp_path / "connections.csv")
    assert platform.device("sycl:cpu0").shares_with == "cpu0"


@pytest.mark.fpga
def test_devices_calls_the_emulator_one(tmp_path):
    shown = shown_by_devices(tmp_path)
    assert re.search(r"fpga_emu0 .*usable \(emulator\)", shown)
    assert "FPGA emulator (functional only)" in shown


def test_devices_says_how_to_add_sycl(tmp_path, monkeypatch):
    monkeypatch.setattr(sycl_runtime, "installed_wheels", dict)
    monkeypatch.setattr(sycl_runtime, "find_library", lambda _: None)
    result = invoke("devices", "--no-measure", "--output-dir", tmp_path)
    assert result.exit_code == 0
    assert re.search(r"^No SYCL device: .* pip install .*dpctl==0.21.\*", result.stdout, re.MULTILINE)


# --- compose --------------------------------------------------------------------------------------------------------


def test_compose_prints_and_writes_program_matrix_and_placement(composed):
    folder, output = composed
    out = folder / "runs" / "small"
    compile((out / "program.py").read_text(), "program.py", "exec")
    matrix = AssignmentMatrix.from_json((out / "program.matrix.json").read_text())
    placement = Placement.from_json((out / "program.placement.json").read_text())
    assert matrix.devices[0] == placement.host == "cpu0"
    for text in ("assignment matrix", "Placement for throughput", "Run it:    python ", "program.py"):
        assert text in output


def test_compose_again_keeps_an_edited_program(composed, caplog):
    folder, _ = composed
    program = folder / "programs" / "mine.py"
    extra = ("--json", folder / "programs" / "p.json", "--matrix-json", folder / "programs" / "m.json")
    assert invoke("compose", folder / "small.toml", "--output", program, *extra).exit_code == 0
    edited = program.read_text() + "# mine\n"
    program.write_text(edited)
    result = invoke("compose", folder / "small.toml", "--output", program, *extra)
    assert result.exit_code == 0
    kept = program.with_name("mine-earlier-001.py")
    assert kept.read_text() == edited
    assert kept.name in caplog.text
    assert "# mine" not in program.read_text()
    assert (folder / "programs" / "p.json").exists()
    assert (folder / "programs" / "m.json").exists()


@pytest.mark.parametrize(
    ("options", "both"),
    [
        (
            ("--json", "a.json", "--matrix-json", "./a.json"),
            r"the matrix \(--matrix-json\) and the placement \(--json\)",
        ),
        (("--output", "a.py", "--json", "a.composition.json"), r"the program's composition and the placement"),
        (("--output", "small.toml"), "the composition file and the program"),
    ],
)
def test_compose_writes_no_file_over_another(tmp_path, monkeypatch, options, both):
    monkeypatch.chdir(tmp_path)
    Path("small.toml").write_text(SPEC)
    result = invoke("compose", "small.toml", *options)
    assert result.exit_code == 1
    assert re.search(f"would be {both}", result.stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["small.toml"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (SPEC.replace("size = 1000", "sise = 1000"), "Did you mean 'size'?"),
        (SPEC.replace("CartPole-v1", "CartPole-v9"), "CartPole-v9"),
        (SPEC.replace("CartPole-v1", "__import__('os').system('touch pwned')"), "not the name of an environment"),
        (SPEC.replace("CartPole-v1", "Pendulum-v1"), "Discrete action space"),
        (SPEC.replace("batch_size = 32", "batch_size = 2000"), "A batch of 2000"),
        (SPEC.replace("timesteps = 400", "timesteps = 100"), "would not train: learning_starts is 100"),
        (SPEC + "[platform]\ndevices = 'absent.csv'\nconnections = 'absent.csv'\n", "absent.csv"),
        (SPEC + "[platform\n", "line 15"),
    ],
)
def test_compose_explains_what_is_wrong(tmp_path, monkeypatch, text, part):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("composer.replay_composing.Profiler", None)  # nothing is measured
    Path("bad.toml").write_text(text)
    result = invoke("compose", "bad.toml")
    assert result.exit_code == 1
    assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bad.toml"]


def test_compose_for_a_null_device_keeps_matrix_and_placement(tmp_path, monkeypatch):
    monkeypatch.setenv("PEARL_CACHE_DIR", str(tmp_path / "cache"))
    null = "sample_us=0.4;insert_us=0.3;update_us=0.3;learner_us=0.5"
    (tmp_path / "d.csv").write_text(
        f"name,kind,backend,selector\ncpu0,cpu,cpu,\nfpga0,fpga,sycl,opencl:accelerator:9\nfast,gpu,null,{null}\n"
    )
    (tmp_path / "c.csv").write_text("source,target,latency_us,bandwidth_gbps\ncpu0,fast,1,16\n")
    (tmp_path / "null.toml").write_text(SPEC + "[platform]\ndevices = 'd.csv'\nconnections = 'c.csv'\n")
    result = invoke("compose", tmp_path / "null.toml")
    assert result.exit_code == 1
    assert "null device" in result.stderr
    assert "fpga0 is left out" in result.stdout
    placement = Placement.from_json((tmp_path / "runs/null/program.placement.json").read_text())
    assert (placement.replay_manager, placement.learner) == ("fast", "fast")
    assert not (tmp_path / "runs/null/program.py").exists()


def test_compose_says_where_it_cannot_write_before_it_measures(composed, monkeypatch):
    folder, _ = composed
    (folder / "file").touch()
    monkeypatch.setattr("composer.replay_composing.Profiler", None)
    result = invoke("compose", folder / "small.toml", "--output", folder / "file" / "program.py")
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


def test_measurements_of_another_machine_are_imported_by_a_command(composed, tmp_path, monkeypatch):
    folder, _ = composed
    [measured] = (folder / "cache").glob("calibration-*.json")
    monkeypatch.setenv("PEARL_CACHE_DIR", str(tmp_path))
    result = invoke("calibrate", "--import", measured)
    assert result.exit_code == 0, result.output
    count = len(json.loads(measured.read_text())["entries"])
    assert f"Imported {count} of {count} entries" in result.stdout
    result = invoke("compose", folder / "small.toml", "--output", tmp_path / "p.py")
    assert result.exit_code == 0, result.output
    assert "profiled: 0 measured" in result.stdout
    assert "imported" in result.stdout
    (tmp_path / "other.json").write_text('{"format": "pearl-matrix"}')
    result = invoke("calibrate", "--import", tmp_path / "other.json")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"Error: {tmp_path / 'other.json'} is no calibration file")


# --- run and bench --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ((), []),
        (("--seed", "3", "--serial"), ["--seed", "3", "--serial"]),
        (("--", "--seed", "3"), ["--seed", "3"]),
        (("--help",), ["--help"]),
        (("--debug", "a", "--", "b"), ["--debug", "a", "--", "b"]),
    ],
)
def test_run_passes_options_on(stub, given, seen):
    assert invoke("run", stub, *given).exit_code == 0
    assert json.loads((stub.parent / "seen.json").read_text()) == seen


@pytest.mark.parametrize("options", [(), ("--debug",)])
def test_debug_reaches_the_program(stub, options):
    with pearl_command(*options, "run", stub) as process:
        assert process.wait(60) == 0
    assert (stub.parent / "debug").read_text() == ("1" if options else "")


@pytest.mark.parametrize("lost", [">/dev/full 2>&1", ">&- 2>&-", "2>&1 | true"])
def test_output_that_is_lost_does_no_harm(tmp_path, lost):
    (tmp_path / "summary.json").write_text("{}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m pearl report {tmp_path} {lost}"
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_run_returns_the_exit_code(stub):
    assert invoke("run", stub, "--fail").exit_code == 7
    stub.write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert invoke("run", stub).exit_code == 128 + signal.SIGKILL


def test_run_names_a_program_that_is_absent(tmp_path):
    result = invoke("run", tmp_path / "absent.py")
    assert result.exit_code == 1
    assert "pearl compose" in result.stderr


@pytest.mark.parametrize(
    ("send", "number"),
    [
        (lambda process: os.killpg(process.pid, signal.SIGINT), signal.SIGINT),  # as a terminal does on Ctrl-C
        (lambda process: process.send_signal(signal.SIGINT), signal.SIGINT),  # as a supervisor may
        (lambda process: process.send_signal(signal.SIGTERM), signal.SIGTERM),
        (lambda process: os.killpg(process.pid, signal.SIGHUP), signal.SIGHUP),  # as a terminal does that is closed
    ],
)
def test_run_lets_the_program_stop_in_good_order(stub, send, number):
    with pearl_command("run", stub, "--wait", start_new_session=True, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not (stub.parent / "ready").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        send(process)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert (stub.parent / "stopped").read_text() == str(int(number))
    assert errors == ""


def test_an_interrupt_of_run_alone_leaves_the_programs_checkpoint(composed, tmp_path):
    folder, _ = composed
    options = ("--timesteps", "500000", "--checkpoint-interval", "400000", "--run-dir", tmp_path / "run")
    command = ("run", folder / "runs" / "small" / "program.py", *options)
    with pearl_command(*command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        episodes = tmp_path / "run" / "episodes.csv"
        deadline = time.monotonic() + 60
        while not (episodes.exists() and episodes.read_text().count("\n") > 5) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 130, output
    assert "SIGINT received" in output
    assert "Traceback" not in output
    assert len(list((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))) == 1


def test_bench_shows_measured_beside_predicted(stub):
    result = invoke("bench", stub, "--seconds", "2.5", "--", "--seed", "3")
    assert result.exit_code == 0, result.output
    assert "900 (0.90 of the prediction)" in result.stdout
    assert "1,000" in result.stdout
    seen = json.loads((stub.parent / "seen.json").read_text())
    assert seen[:3] == ["--bench", "--bench-seconds", "2.5"]
    assert seen[-2:] == ["--seed", "3"]
    assert not Path(seen[4]).exists()  # its temporary folder is gone


@pytest.mark.parametrize("option", ["--run-dir", "--run-dir=here", "--run"])
def test_bench_measures_in_no_folder_of_the_users(stub, option):
    result = invoke("bench", stub, "--", option, "here")
    assert result.exit_code == 1
    assert "leave --run-dir out" in result.stderr
    assert not (stub.parent / "seen.json").exists()


def test_bench_of_something_else(stub, tmp_path):
    stub.write_text("")
    result = invoke("bench", stub)
    assert result.exit_code == 1
    assert "not a composed program" in result.stderr
    stub.write_text("raise SystemExit(3)")
    assert invoke("bench", stub).exit_code == 3
    assert invoke("bench", tmp_path / "absent.py").exit_code == 1
    (tmp_path / "my.toml").write_text(SPEC)
    for command in ("run", "bench"):
        assert "`pearl compose" in invoke(command, tmp_path / "my.toml").stderr


def test_compose_run_report(composed, tmp_path):
    folder, _ = composed
    options = ("--run-dir", tmp_path / "run", "--serial", "--eval-episodes", "2", "--until-return", "none", "--plot")
    assert invoke("run", folder / "runs" / "small" / "program.py", *options).exit_code == 0
    result = invoke("report", tmp_path / "run")
    assert result.exit_code == 0, result.output
    for text in (
        "CartPole-v1",
        "all steps done",
        "2 greedy episodes",
        "learning_curve.png",
        "best weights",
        "checkpoint-0000004",
    ):
        assert text in result.stdout
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    for text in ("Platform and placement", "Every placement", "Return over environment steps", "EPS over seconds"):
        assert text in page
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "summary.json").unlink()
    result = invoke("report", tmp_path / "run")
    assert result.exit_code == 0
    assert "has no summary.json" in result.stdout


# --- report ---------------------------------------------------------------------------------------------------------


def test_report_of_a_folder_that_is_no_run(tmp_path):
    result = invoke("report", tmp_path)
    assert result.exit_code == 1
    assert "is not the folder of a run" in result.stderr


@pytest.mark.parametrize("text", ["", "{", "[1]", "\x00"])
def test_report_of_a_damaged_summary(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    (tmp_path / "progress.csv").write_text("wall_s,env_steps\n1.0,1000\n")
    result = invoke("report", tmp_path)
    assert result.exit_code == 1
    assert "summary.json" in result.stderr
    assert "1,000" in result.stdout
    assert "summary.json" in (tmp_path / "report.html").read_text(encoding="utf-8"), "the other files are shown"


def test_report_of_an_incomplete_summary_shows_what_is_there(tmp_path):
    (tmp_path / "summary.json").write_text(
        '{"environment": "CartPole-v1", "env_steps": "many", "last": {}, "best": {"mean": null}}'
    )
    result = invoke("report", tmp_path)
    assert result.exit_code == 0
    assert "CartPole-v1" in result.stdout


def test_report_leaves_out_what_is_not_known_yet(tmp_path):
    (tmp_path / "progress.csv").write_text("env_steps,training_return,td_error,power/watts\n2000,nan,0.25,\n")
    result = invoke("report", tmp_path)
    assert result.exit_code == 0
    assert "td_error" in result.stdout
    assert " nan " not in result.stdout
    assert "watts" not in result.stdout


def test_report_of_a_killed_run_takes_the_last_complete_row(tmp_path):
    (tmp_path / "progress.csv").write_text("wall_s,env_steps,mean_return\n1.0,1000,20.5\n2.0,2000,30.25\n3.0,30")
    result = invoke("report", tmp_path)
    assert result.exit_code == 0
    assert "2,000" in result.stdout
    assert "30.25" in result.stdout
    assert "has no summary.json" in result.stdout


def test_report_shows_small_numbers(tmp_path):
    (tmp_path / "progress.csv").write_text(
        "wall_s,env_steps,learning_rate,td_error,epsilon\n1.5,2000,0.0003,-0.04567,0.0\n"
    )
    shown = invoke("report", tmp_path, "--no-html").output
    for row in ("wall_s | 1.50", "env_steps | 2,000", "learning_rate | 0.0003", "td_error | -0.0457", "epsilon | 0.00"):
        assert row in re.sub(" +", " ", shown)


def test_report_tells_a_summary_from_an_earlier_run(tmp_path):
    (tmp_path / "summary.json").write_text('{"environment": "CartPole-v1"}')
    os.utime(tmp_path / "summary.json", (0, 0))
    (tmp_path / "progress.csv").write_text("wall_s,env_steps\n1.0,1000\n")
    assert "newer than this summary" in invoke("report", tmp_path).stdout
