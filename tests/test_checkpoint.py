"""Checkpoints: what goes in comes out, what is damaged is refused by name, a kill leaves the last complete one."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fuzz.checkpoint_property import CAPACITY, check
from fuzz.checkpoint_seeds import write_seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pearl.backends.cpu.replay import NativeReplayManager
from pearl.errors import CheckpointError, CheckpointReadError
from pearl.replay.reference import ReferenceReplayManager
from pearl.runtime import checkpoint, checkpoint_files
from pearl.runtime.checkpoint import CheckpointState, latest_checkpoint, load_checkpoint, save_checkpoint
from pearl.runtime.checkpoint_files import Tensors

IDENTITY = {"trainer": "DQNTrainer", "env": "CartPole-v1", "network": "4:linear128"}


def state_at(step: int) -> CheckpointState:
    return CheckpointState(
        step=step,
        identity=IDENTITY,
        counters={"gradient_steps": 7, "mean_return": 12.5, "mode": "prioritized", "rescaled": False},
        tensors={"q_network": {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(0)}},
        arrays={"replay/leaves": np.arange(5000, dtype=np.uint32), "replay/obs": np.full((10, 4), step, np.float32)},
    )


def in_torch(loaded: Tensors) -> dict[str, dict[str, torch.Tensor]]:
    return {group: {name: torch.as_tensor(v) for name, v in found.items()} for group, found in loaded.items()}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path, state_at(1000))


def rewrite_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest as an adversary would: with a checksum that fits."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["crc32"] = checkpoint_files.manifest_crc32(manifest)
    path.write_text(json.dumps(manifest))


def replace_file(folder: Path, name: str, content: bytes) -> None:
    """Put other content where the manifest expects a file, with size and checksum that fit."""
    (folder / name).write_bytes(content)
    entry = {"bytes": len(content), "crc32": f"{zlib.crc32(content):08x}"}
    rewrite_manifest(folder, lambda m: m["files"].__setitem__(name, entry))


# --- Round trip -----------------------------------------------------------------------------------------------------


def test_everything_comes_back(saved: Path) -> None:
    expected, loaded = state_at(1000), load_checkpoint(saved, IDENTITY)
    assert saved.name == "checkpoint-000001000"
    assert (loaded.step, loaded.identity, loaded.counters) == (1000, expected.identity, expected.counters)
    torch.testing.assert_close(in_torch(loaded.tensors), expected.tensors, rtol=0, atol=0)
    assert loaded.arrays.keys() == expected.arrays.keys()
    for name, array in expected.arrays.items():
        np.testing.assert_array_equal(loaded.arrays[name], array)
        assert isinstance(loaded.arrays[name], np.memmap)


def test_loading_without_maps_gives_arrays_in_memory(saved: Path) -> None:
    loaded = load_checkpoint(saved, mmap=False)
    assert type(loaded.arrays["replay/leaves"]) is np.ndarray
    loaded.arrays["replay/leaves"][0] = 1


def test_counters_that_are_not_finite_or_numpy_scalars_come_back(tmp_path: Path) -> None:
    counters: dict[str, Any] = {
        "ratio": float("inf"),
        "mean": float("nan"),
        "steps": np.int64(2**40),
        "on": np.bool_(True),
    }
    loaded = load_checkpoint(save_checkpoint(tmp_path, CheckpointState(1, counters=counters)))
    assert loaded.counters["ratio"] == float("inf")
    assert np.isnan(float(loaded.counters["mean"]))
    assert loaded.counters["steps"] == 2**40
    assert loaded.counters["on"] is True


dtypes = st.sampled_from(["?", "u1", "i2", "<u4", ">i8", "u8", "f2", "<f4", ">f8", "c16", "M8[s]", "S3", "U2"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_arrays_of_any_shape_dtype_and_layout_come_back(tmp_path: Path, data: st.DataObject) -> None:
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=7)
    array = data.draw(hnp.arrays(dtype=data.draw(dtypes.map(np.dtype)), shape=shapes))
    layout = data.draw(st.sampled_from(["c", "fortran", "transposed", "reversed", "strided", "read-only"]))
    if layout == "fortran":
        array = np.asfortranarray(array)
    elif layout == "transposed":
        array = array.T
    elif layout == "reversed" and array.ndim:
        array = array[::-1]
    elif layout == "strided" and array.ndim:
        array = array[..., ::2]
    array.setflags(write=layout != "read-only")
    directory = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint_files, "_CHUNK_BYTES", data.draw(st.sampled_from([1, 16, 100, 2**20])))
        folder = save_checkpoint(directory, CheckpointState(1, arrays={"a": array}), keep=1)
    for mmap in (True, False):
        found = load_checkpoint(folder, mmap=mmap).arrays["a"]
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()


torch_dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(torch_dtypes),
    shape=st.lists(st.integers(0, 5), max_size=4),
    transpose=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_tensors_of_any_shape_dtype_and_layout_come_back(
    tmp_path: Path, dtype: torch.dtype, shape: list[int], transpose: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(shape, generator=generator) * 100).to(dtype)
    if transpose and tensor.ndim >= 2:
        tensor = tensor.transpose(0, 1)
    part = tensor[..., :1] if tensor.ndim else tensor
    state = CheckpointState(1, tensors={"g": {"a": tensor, "tied": tensor, "part": part}})
    found = load_checkpoint(save_checkpoint(tmp_path / "run", state, keep=1)).tensors
    assert isinstance(found["g"]["a"], np.ndarray) == (dtype != torch.bfloat16)
    loaded = in_torch(found)["g"]
    assert loaded["a"].dtype == dtype
    assert torch.equal(loaded["a"], tensor)
    assert torch.equal(loaded["tied"], tensor)
    assert torch.equal(loaded["part"], part)


def test_what_other_packages_add_to_numpy_changes_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ml_dtypes")  # its bfloat16 is a dtype of NumPy once it is imported
    tensor = torch.arange(3.0).to(torch.bfloat16)
    state = CheckpointState(1, tensors={"g": {"a": tensor, "b": torch.ones(2)}})
    found = load_checkpoint(save_checkpoint(tmp_path, state)).tensors["g"]
    assert isinstance(found["a"], torch.Tensor)
    assert torch.equal(found["a"], tensor)


def test_arrays_are_streamed_not_copied(tmp_path: Path) -> None:
    # Address space is capped in a child: 300 MB of view, 100 MB of room.
    script = """
        import resource, sys
        from pathlib import Path
        import numpy as np
        from pearl.runtime.checkpoint import CheckpointState, save_checkpoint
        rows = np.zeros((2, 150_000_000), np.uint8)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 100_000_000,) * 2)
        save_checkpoint(Path(sys.argv[1]), CheckpointState(1, arrays={"contiguous": rows, "strided": rows[:, ::2]}))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=True, timeout=120)
    assert load_checkpoint(tmp_path).arrays["strided"].shape == (2, 75_000_000)


# --- Which checkpoints there are ------------------------------------------------------------------------------------


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_the_newest_are_kept_and_the_latest_is_found(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path) is None
    assert latest_checkpoint(tmp_path / "absent") is None
    for step in (1, 2, 999_999_999, 1_000_000_000):
        save_checkpoint(tmp_path, state_at(step))
    assert names(tmp_path) == ["checkpoint-1000000000", "checkpoint-999999999"]
    assert latest_checkpoint(tmp_path) == tmp_path / "checkpoint-1000000000"
    assert load_checkpoint(tmp_path).step == 1_000_000_000


def test_a_step_saved_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state_at(1))
    for mean in (1.0, 2.0):
        save_checkpoint(tmp_path, CheckpointState(5, counters={"mean": mean}))
    assert len(names(tmp_path)) == 2
    assert load_checkpoint(tmp_path).counters == {"mean": 2.0}


def test_checkpoints_of_later_steps_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for step in (10, 20, 5, 6, 7):
        save_checkpoint(tmp_path, state_at(step))
    assert names(tmp_path) == [f"checkpoint-{step:09}" for step in (6, 7, 10, 20)]
    assert "later step" in caplog.text


def test_what_an_interrupted_save_left_is_removed_and_never_loaded(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state_at(1))
    leftover = tmp_path / ".checkpoint-000000002-tmp-99"
    shutil.copytree(tmp_path / "checkpoint-000000001", leftover)
    (tmp_path / "checkpoint-000000009").mkdir()
    (tmp_path / "notes.txt").write_text("the user's own")
    assert load_checkpoint(tmp_path).step == 1
    save_checkpoint(tmp_path, state_at(3))
    assert not leftover.exists()
    assert (tmp_path / "notes.txt").exists()


def test_two_writers_do_not_share_a_directory(tmp_path: Path) -> None:
    with checkpoint._only_writer(tmp_path), pytest.raises(CheckpointError, match="Another process or thread is saving"):
        save_checkpoint(tmp_path, state_at(1))
    save_checkpoint(tmp_path, state_at(1))


def forked(work: Callable[[], object]) -> int:
    """Run `work` in a copy of this process and return its id; the copy ends without the parent's cleaning up."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return child


def test_a_killed_save_leaves_the_latest_complete_one(tmp_path: Path) -> None:
    def save_on_and_on(start: int, report: int) -> None:
        for step in range(start, start + 10_000):
            array = np.full(1_000_000, step, np.uint64)
            save_checkpoint(tmp_path, CheckpointState(step, counters={"of": step}, arrays={"a": array}))
            os.write(report, f"{step}\n".encode())

    delays = np.random.default_rng(4).uniform(0.0, 0.08, 30)
    interrupted, start = 0, 0
    for delay_s in delays:
        read, report = os.pipe()
        child = forked(lambda start=start, report=report: save_on_and_on(start, report))  # type: ignore[misc]
        os.close(report)
        with os.fdopen(read) as reports:
            reported = int(reports.readline())
            time.sleep(delay_s)
            os.kill(child, signal.SIGKILL)
            reported = max([reported, *(int(line) for line in reports if line.endswith("\n"))])
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        interrupted += any(name.startswith(".checkpoint") for name in names(tmp_path))
        state = load_checkpoint(tmp_path)
        assert state.step >= reported
        assert state.counters == {"of": state.step}
        assert np.all(state.arrays["a"] == state.step)
        start = state.step + 1
    assert interrupted, "no kill fell into a save: the test shows nothing"


def save_and_die(directory: Path, at: int) -> None:
    """Save step 2, and be killed at the `at`-th change to the file system, write or flush."""
    count = 0

    def died() -> None:
        nonlocal count
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)

    changes = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}
    sys.addaudithook(lambda event, _: died() if event in changes else None)

    def dying(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            died()
            return call(*arguments)

        return wrapped

    zlib.crc32, os.fsync = dying(zlib.crc32), dying(os.fsync)
    checkpoint_files._CHUNK_BYTES = 8_000
    save_checkpoint(directory, state_at(2), keep=1)


def test_a_save_killed_at_any_step_leaves_the_one_before_or_the_new_one(tmp_path: Path) -> None:
    before, seen = tmp_path / "before", set()
    save_checkpoint(before, state_at(1))
    for at in range(1, 200):
        directory = tmp_path / str(at)
        shutil.copytree(before, directory)
        child = forked(lambda directory=directory, at=at: save_and_die(directory, at))  # type: ignore[misc]
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)
        found, state = names(directory), load_checkpoint(directory)
        hidden = [name for name in found if name.startswith(".")]
        seen.add((state.step, len(found) - len(hidden), len(hidden)))
        if state.step == 1:
            assert "checkpoint-000000002" not in found
        assert np.all(state.arrays["replay/obs"] == state.step)
        torch.testing.assert_close(in_torch(state.tensors), state_at(1).tensors, rtol=0, atol=0)
        if at % 5 == 0:
            save_checkpoint(directory, state_at(3), keep=1)
            assert names(directory) == ["checkpoint-000000003"]
        shutil.rmtree(directory)
        if status == 0:
            break
    assert status == 0
    # The step that is latest, complete folders, hidden ones: before the new folder, while it is written, once it has
    # its name, while the old one is being removed, and after.
    assert seen == {(1, 1, 0), (1, 1, 1), (2, 2, 0), (2, 1, 1), (2, 1, 0)}
    assert at > 40


def test_saving_in_two_threads_is_refused_not_mixed(tmp_path: Path) -> None:
    outcomes: list[object] = []

    def save(step: int) -> None:
        try:
            outcomes.append(save_checkpoint(tmp_path, CheckpointState(step, arrays={"a": np.full(10**6, step)})))
        except CheckpointError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=save, args=(step,)) for step in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 4
    state = load_checkpoint(tmp_path)
    assert np.all(state.arrays["a"] == state.step)


# --- What cannot be saved -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (CheckpointState(-1), "whole number"),
        (CheckpointState(2**63), "whole number"),
        (CheckpointState(1, arrays={"../x": np.zeros(1)}), "cannot name an? array"),
        (CheckpointState(1, arrays={"/etc/x": np.zeros(1)}), "cannot name an? array"),
        (CheckpointState(1, tensors={"a//b": {}}), "cannot name an? tensor group"),
        (CheckpointState(1, arrays={"a": np.array([None])}), "Python objects"),
        (CheckpointState(1, counters={"a": [1]}), "counters are numbers"),  # type: ignore[dict-item]
        (CheckpointState(1, identity={"a": 1}), "identity holds texts"),  # type: ignore[dict-item]
        (CheckpointState(1, tensors={"g": {"a": torch.eye(2).to_sparse()}}), "Tensor group 'g' cannot be stored"),
    ],
)
def test_a_state_that_cannot_be_stored_is_refused(tmp_path: Path, state: CheckpointState, message: str) -> None:
    save_checkpoint(tmp_path, state_at(1))
    with pytest.raises(CheckpointError, match=message):
        save_checkpoint(tmp_path, state)
    assert names(tmp_path) == ["checkpoint-000000001"]


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="at least 1"):
        save_checkpoint(tmp_path, state_at(1), keep=0)


@contextmanager
def files_limited_to(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_write_that_fails_leaves_the_older_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state_at(1))
    big = CheckpointState(2, arrays={"a": np.zeros(2_000_000, np.uint8)})
    with (
        files_limited_to(1_000_000),
        pytest.raises(CheckpointError, match=r"step 2 could not be written .* File too large"),
    ):
        save_checkpoint(tmp_path, big)
    assert names(tmp_path) == ["checkpoint-000000001"]
    assert load_checkpoint(tmp_path).step == 1


def test_a_full_disk_is_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=5_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs 20\.2 KB; 5\.0 KB are free"):
        save_checkpoint(tmp_path, state_at(1))
    assert names(tmp_path) == []


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"could not be written into .*file/run"):
        save_checkpoint(tmp_path / "file" / "run", state_at(1))


def test_an_interrupt_while_writing_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "write_manifest", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, state_at(1))
    assert names(tmp_path) == []


# --- What cannot be loaded ------------------------------------------------------------------------------------------


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(path)
    for part in parts:
        assert part in str(caught.value)


def same_json(one: bytes | bytearray, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


def test_a_missing_path_a_file_and_an_empty_folder_are_refused(tmp_path: Path) -> None:
    refused(tmp_path / "absent", "absent", "does not exist")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "is a file")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "neither a checkpoint")


FILES = ("tensors/q_network.safetensors", "arrays/replay/leaves.npy", "arrays/replay/obs.npy")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named_with_both_sizes(saved: Path, name: str) -> None:
    size = (saved / name).stat().st_size
    os.truncate(saved / name, size - 1)
    refused(saved, name, f"has {size - 1} bytes; {size} were written", "start without --resume")


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named(saved: Path, name: str) -> None:
    (saved / name).unlink()
    refused(saved, f"{name} is missing")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from([*FILES, "manifest.json"]), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_flipped_bit_is_found(saved: Path, name: str, where: float, bit: int) -> None:
    path = saved / name
    original = path.read_bytes()
    content = bytearray(original)
    content[int(where * len(content))] ^= 1 << bit
    try:
        path.write_bytes(content)
        # A flipped bit between two tokens of a JSON text may leave it the same: one white space for another.
        if name != "manifest.json" or not same_json(content, original):
            refused(saved, name if name != "manifest.json" else "cannot be loaded")
    finally:
        path.write_bytes(original)


def test_the_other_checkpoint_is_offered(tmp_path: Path) -> None:
    older, newest = save_checkpoint(tmp_path, state_at(1)), save_checkpoint(tmp_path, state_at(2))
    os.truncate(newest / FILES[1], 10)
    refused(tmp_path, f"--resume goes on from {older}")
    assert load_checkpoint(older).step == 1


def test_a_file_that_cannot_be_read_now_does_not_make_a_checkpoint_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, state_at(1))
    save_checkpoint(tmp_path, state_at(2))

    def fail(file: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(checkpoint_files, "_check_npy", fail)
    with pytest.raises(CheckpointReadError, match=r"ulimit -n .* may be sound: resume again") as caught:
        load_checkpoint(tmp_path)
    assert "Move it away" not in str(caught.value)


def test_another_format_version_is_refused(saved: Path) -> None:
    rewrite_manifest(saved, lambda m: m.update(format_version=99, pearl_version="9.9", more={}))
    refused(saved, "format version is 99", "'9.9'", f"reads version {checkpoint_files.FORMAT_VERSION}")


def test_a_foreign_identity_lists_every_difference(saved: Path) -> None:
    mine = {"trainer": "SACTrainer", "env": "CartPole-v1", "columns": "obs"}
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(saved, mine)
    message = str(caught.value)
    assert "trainer: this program has SACTrainer; the checkpoint has DQNTrainer" in message
    assert "columns: this program has obs; the checkpoint has (absent)" in message
    assert "network: this program has (absent); the checkpoint has 4:linear128" in message
    assert "env:" not in message


@pytest.mark.parametrize(
    "name",
    [
        "../x.npy",
        "arrays/../../x.npy",
        "/etc/passwd",
        "arrays//x.npy",
        "/arrays/x.npy",
        "arrays/.x.npy",
        "tensors/../manifest.json",
        "manifest.json",
        "arrays/a\n.npy",
        "arrays/a.pkl",
        "other/a.npy",
    ],
)
def test_a_manifest_cannot_name_other_files(saved: Path, name: str) -> None:
    rewrite_manifest(saved, lambda m: m["files"].__setitem__(name, {"bytes": 1, "crc32": "00000000"}))
    refused(saved, f"names the file {name!r}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(more=1), "unknown keys ['more']"),
        (lambda m: m.pop("counters"), "lacks the keys ['counters']"),
        (lambda m: m.update(step="1"), "step is '1'"),
        (lambda m: m.update(step=True), "step is True"),
        (lambda m: m.update(step=10**400), "step is 1000"),
        (lambda m: m.update(files=[]), "'files'"),
        (lambda m: m.update(identity={"a": 1}), "'identity'"),
        (lambda m: m.update(counters={"a": []}), "'counters'"),
        (lambda m: m.update(format="zip"), "does not say"),
        (lambda m: m["files"][FILES[0]].update(more=1), "bytes and crc32"),
        (lambda m: m["files"][FILES[0]].update(bytes=-1), "bytes and crc32"),
    ],
)
def test_a_manifest_that_is_not_as_written_is_refused(
    saved: Path, change: Callable[[dict[str, Any]], object], message: str
) -> None:
    rewrite_manifest(saved, change)
    refused(saved, message)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", "null", "\x00", '{"format": "pearl checkpoint"}'])
def test_a_manifest_that_is_no_manifest_is_refused(saved: Path, text: str) -> None:
    (saved / "manifest.json").write_text(text)
    refused(saved, str(saved))


def test_an_edited_manifest_is_refused(saved: Path) -> None:
    path = saved / "manifest.json"
    path.write_text(path.read_text().replace('"step": 1000', '"step": 1001'))
    refused(saved, "manifest.json was changed or damaged")


def test_links_are_not_followed(saved: Path) -> None:
    path = saved / FILES[1]
    path.rename(saved.parent / "elsewhere.npy")
    path.symlink_to(saved.parent / "elsewhere.npy")
    refused(saved, "not a plain file")


class Payload:
    """Unpickling this would end the test run."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os._exit, (66,))


@pytest.mark.parametrize("mmap", [True, False])
def test_pickled_objects_are_never_loaded(saved: Path, mmap: bool) -> None:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.array([Payload()]), version=(2, 0), allow_pickle=True)
    for content in (stream.getvalue(), pickle.dumps(Payload()), b"PK\x03\x04" + bytes(60), b"", b"\x93NUMPY"):
        replace_file(saved, FILES[1], content)
        with pytest.raises(CheckpointError, match=r"leaves\.npy is not a \.npy file"):
            load_checkpoint(saved, mmap=mmap)
    replace_file(saved, FILES[1], np_file_with_shape((3,)))
    replace_file(saved, FILES[0], pickle.dumps(Payload()))
    refused(saved, "q_network.safetensors is not a safetensors file")


CORPUS = sorted((Path(__file__).parent / "fuzz" / "corpus").iterdir())


@pytest.mark.parametrize("found", CORPUS, ids=lambda path: path.name)
def test_what_a_fuzzer_found_is_read_or_refused(tmp_path: Path, found: Path) -> None:
    check(found.read_bytes(), tmp_path)


def test_the_inputs_that_the_fuzzer_starts_from_are_read(tmp_path: Path) -> None:
    write_seeds(tmp_path / "seeds")
    seeds = sorted((tmp_path / "seeds").iterdir())
    assert len(seeds) > 20
    for seed in seeds:
        assert check(seed.read_bytes(), tmp_path) is not None, seed.name


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_checkpoints_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    seeds = tmp_path / "seeds"
    if not seeds.exists():
        write_seeds(seeds)
    content = bytearray(data.draw(st.sampled_from(sorted(seeds.iterdir()))).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(1, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=6))
    check(bytes(content), tmp_path)


def test_a_manifest_that_can_be_read_but_not_written_again_is_refused(saved: Path) -> None:
    # Where the one turns into the other depends on the depth of the call.
    text = (saved / "manifest.json").read_text().rstrip("}\n ")
    for depth in range(sys.getrecursionlimit() - 300, sys.getrecursionlimit() + 10, 2):
        (saved / "manifest.json").write_text(f'{text}, "more": {"[" * depth}{"]" * depth}}}')
        refused(saved, "manifest.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_priority": 1e300}, "max_priority must be a float32 from 1 on; found 1e\\+300"),
        ({"priorities": np.ones(CAPACITY, np.float32)}, "priorities are damaged: some are of unwritten slots"),
        ({"priorities": np.zeros(CAPACITY, np.float32)}, "leaves are damaged: some are not those of their priorities"),
        ({"seed": np.zeros(CAPACITY, np.uint32)}, "where a number was expected"),
        ({"mode": np.zeros(CAPACITY, np.uint32)}, "mode must be a number or a text; found an array"),
        ({"capacity": np.zeros(CAPACITY, np.uint32)}, "capacity must be a number or a text; found an array"),
        ({"inserts": float("nan")}, "inserts must be a whole number that fits; found nan"),
    ],
)
@pytest.mark.parametrize("manager", [NativeReplayManager, ReferenceReplayManager], ids=["native", "reference"])
def test_a_replay_refuses_what_the_fuzzer_made_of_its_state(manager: Any, change: dict[str, Any], message: str) -> None:
    replay = manager(CAPACITY, mode="top_k")
    replay.insert(np.arange(6), np.linspace(0.0, 3.0, 6))
    state = replay.state_dict()
    with pytest.raises(CheckpointError, match=message):
        replay.load_state_dict({**state, **change})
    assert np.array_equal(replay.state_dict()["leaves"], state["leaves"])


def np_file_with_shape(shape: tuple[int, ...]) -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.zeros(3, np.float32), version=(2, 0))
    return stream.getvalue().replace(b"(3,), ", f"{shape}, ".encode())


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("shape", [(9,), (10**15,), (-3,), (2**62, 2**62)])
def test_a_header_that_promises_more_than_the_file_holds_is_refused(
    saved: Path, mmap: bool, shape: tuple[int, ...]
) -> None:
    replace_file(saved, FILES[1], np_file_with_shape(shape))
    with pytest.raises(CheckpointError, match="leaves"):
        load_checkpoint(saved, mmap=mmap)
