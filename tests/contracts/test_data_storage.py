"""The Data Storage: a ring of columns."""

from __future__ import annotations

from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from references import CUDA, on_host

from pearl.backends.sycl.storage import SyclDataStorage
from pearl.errors import CapacityError, ConfigurationError, DeviceError, ReplayError
from pearl.replay import memory
from pearl.replay.storage import DataStorage
from pearl.spec import FieldSpec, TransitionSpec

SPEC = TransitionSpec(
    (
        FieldSpec("obs", (3, 5), "uint8"),
        FieldSpec("action", (), "int64"),
        FieldSpec("reward", (), "float32"),
        FieldSpec("next_obs", (4,), "float32"),
    )
)


def rows(start, count, spec=SPEC):
    """Rows whose every value tells their number."""
    columns = spec.empty(count)
    for column in columns.values():
        numbers = np.arange(start, start + count).astype(column.dtype)
        column[...] = numbers.reshape(-1, *[1] * (column.ndim - 1))
    return columns


def torch_storage(spec, capacity):
    pytest.importorskip("torch")
    from pearl.backends.cuda.storage import TorchDataStorage

    return TorchDataStorage(spec, capacity, "cpu")


def cuda_storage(spec, capacity):
    from pearl.backends.cuda.storage import CudaDataStorage

    return CudaDataStorage(spec, capacity, CUDA)


def pinned_storage(spec, capacity):
    from pearl.backends.cuda.storage import CudaDataStorage

    return CudaDataStorage(spec, capacity, CUDA, memory="pinned")


@pytest.fixture(
    params=[
        pytest.param(DataStorage, id="numpy"),
        pytest.param(torch_storage, id="torch"),
        pytest.param(SyclDataStorage, id="sycl", marks=pytest.mark.sycl),
        pytest.param(cuda_storage, id="cuda"),
        pytest.param(pinned_storage, id="cuda, pinned"),
    ]
)
def make_storage(request):
    return request.param


def assert_rows(found, expected):
    for name, column in expected.items():
        np.testing.assert_array_equal(on_host(found[name]), column, err_msg=name)


@pytest.mark.parametrize(
    "storage_type",
    [DataStorage, pytest.param(SyclDataStorage, marks=pytest.mark.sycl), cuda_storage],
    ids=["numpy", "sycl", "cuda"],
)
@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 40), data=st.data())
def test_the_ring_holds_the_newest_rows(storage_type, capacity, data):
    storage, inserted = storage_type(SPEC, capacity), 0
    number_in_slot: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 8))):
        count = data.draw(st.integers(0, capacity))
        upcoming = storage.next_indices(count)
        slots = storage.insert(rows(inserted, count))
        assert np.array_equal(slots, upcoming)
        number_in_slot.update(zip(slots.tolist(), range(inserted, inserted + count), strict=True))
        inserted += count
        assert storage.inserted == inserted
        assert storage.size == len(number_in_slot) == min(inserted, capacity)
        assert storage.cursor == inserted % capacity
        if storage.size:
            wanted = data.draw(st.lists(st.integers(0, storage.size - 1), max_size=50))
            found = {name: on_host(column) for name, column in storage.gather(wanted).items()}
            assert_rows({"action": found["action"]}, {"action": [number_in_slot[slot] for slot in wanted]})
            for name in ("obs", "reward", "next_obs"):
                expected = np.array([number_in_slot[slot] for slot in wanted], found[name].dtype)
                first = (slice(None), *[0] * (found[name].ndim - 1))
                assert np.array_equal(found[name][first], expected)


def test_rows_come_back_as_they_went_in(make_storage):
    storage = make_storage(SPEC, 10)
    storage.insert(rows(0, 7))
    slots = storage.insert(rows(7, 6))
    assert slots.tolist() == [7, 8, 9, 0, 1, 2]
    assert_rows(storage.gather([9, 0, 2, 3]), {n: c[[9, 10, 12, 3]] for n, c in rows(0, 13).items()})
    assert storage.nbytes == 10 * SPEC.nbytes == 10 * 43


def test_insertions_of_many_megabytes_arrive_whole(make_storage):
    spec = TransitionSpec((FieldSpec("obs", (2**19,), "float32"), FieldSpec("action", (), "int64")))  # 2 MiB a row
    storage = make_storage(spec, 20)
    storage.insert(rows(0, 4, spec))
    storage.insert(rows(4, 18, spec))  # past the end of the ring
    found = storage.gather(np.arange(20))
    numbers = np.array([20, 21, *range(2, 20)])
    assert_rows({"action": found["action"]}, {"action": numbers})
    assert_rows({"obs": on_host(found["obs"])[:, [0, -1]]}, {"obs": np.stack([numbers, numbers], axis=1)})


def test_what_was_gathered_is_not_changed_by_later_calls(make_storage):
    storage = make_storage(SPEC, 2000)
    storage.insert(rows(0, 2000))
    wanted = [[5, 7, 9], [100, 200, 300], np.arange(2000), [1, 2, 3]]  # also of another size
    found = [storage.gather(indices) for indices in wanted]
    for one, indices in zip(found, wanted, strict=True):
        assert_rows(one, {name: column[indices] for name, column in rows(0, 2000).items()})


def test_part_of_larger_arrays_can_be_inserted(make_storage):
    storage = make_storage(SPEC, 10)
    columns = rows(0, 8)
    columns["next_obs"] = np.asfortranarray(columns["next_obs"])
    assert len(storage.insert(columns, 3)) == 3
    assert_rows(storage.gather([0, 1, 2]), {n: c[:3] for n, c in columns.items()})
    assert storage.size == 3


def test_rows_of_its_own_can_be_inserted_again(make_storage):
    storage = make_storage(SPEC, 10)
    storage.insert(rows(0, 10))
    storage.insert(rows(10, 5))
    own = {name: column[:8] for name, column in storage.columns.items()}  # around the end, over themselves
    expected = {name: column.copy() for name, column in own.items()}
    assert_rows(storage.gather(storage.insert(own)), expected)


def test_gathering_into_the_callers_arrays(make_storage):
    storage = make_storage(SPEC, 10)
    storage.insert(rows(0, 10))
    out = storage.gather([0, 0, 0, 0])
    again = storage.gather([4, 2, 9, 9], out=out)
    assert all(again[name] is out[name] for name in out)
    assert_rows(out, {n: c[[4, 2, 9, 9]] for n, c in rows(0, 10).items()})


def test_strided_rows_of_any_mapping_are_taken(make_storage):
    storage = make_storage(SPEC, 10)
    expected = rows(0, 4)
    strided = {name: np.repeat(column, 2, axis=0)[::2] for name, column in expected.items()}
    storage.insert(MappingProxyType(strided))
    storage.insert(strided)
    assert_rows(storage.gather([0, 1, 2, 3]), expected)
    assert_rows(storage.gather([4, 5, 6, 7]), expected)


def test_arrays_to_gather_into_must_be_writeable_and_contiguous():
    storage = DataStorage(SPEC, 10)
    storage.insert(rows(0, 4))
    read_only = np.empty(2, np.float32)
    read_only.flags.writeable = False
    for reward in (read_only, np.empty(4, np.float32)[::2]):
        out = SPEC.empty(2) | {"reward": reward}
        with pytest.raises(ReplayError, match="'reward' to gather into must be contiguous and writeable"):
            storage.gather([0, 1], out)
    out = SPEC.empty(3)
    storage.gather([3, 0, 3], MappingProxyType(out))
    assert_rows(out, {n: c[[3, 0, 3]] for n, c in rows(0, 4).items()})


@pytest.mark.parametrize("item", [1, 2, 3, 4, 8, 16, 17, 32, 64, 100, 2048, 2100, 28224])
def test_items_of_every_size_are_gathered_whole(make_storage, item):
    spec = TransitionSpec((FieldSpec("obs", (item,), "uint8"),))
    storage = make_storage(spec, 50)
    data = np.random.default_rng(0).integers(0, 256, (50, item), np.uint8)
    storage.insert({"obs": data})
    slots = np.random.default_rng(1).integers(0, 50, 37)
    assert np.array_equal(on_host(storage.gather(slots)["obs"]), data[slots])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": None}, "Column 'reward' is missing"),
        ({"reward": np.zeros(4, np.float64)}, r"Column 'reward' must be float32 .*found float64 \(4,\)"),
        ({"obs": np.zeros((4, 5, 3), np.uint8)}, r"Column 'obs' must be uint8 of shape \(4, 3, 5\).*\(4, 5, 3\)"),
        ({"action": np.zeros(3, np.int64)}, r"Column 'action'.*found int64 \(3,\)"),
        ({"reward": [0.0] * 4}, "Column 'reward' must be an array; found list"),
        ({"reward": 0.0}, "Column 'reward' must be an array; found float"),
        ({"obs": 3}, r"Column 'obs' must be an array \(rows, \*shape\), also of a single row; found 3"),
        ({"colour": np.zeros(4, np.int64)}, "no column 'colour'"),
    ],
)
def test_columns_that_do_not_fit_are_named(change, message):
    storage = DataStorage(SPEC, 10)
    columns = {name: column for name, column in {**rows(0, 4), **change}.items() if column is not None}
    with pytest.raises(ReplayError, match=message):
        storage.insert(columns)
    assert storage.inserted == 0


def test_what_cannot_be_done_says_why(make_storage):
    storage = make_storage(SPEC, 10)
    with pytest.raises(ReplayError, match="0 to 10 rows, the capacity; found 11"):
        storage.insert(rows(0, 11))
    storage.insert(rows(0, 4))
    with pytest.raises(ReplayError, match=r"position 1 must lie in \[0, 4\), the rows stored; found 4"):
        storage.gather([0, 4])
    with pytest.raises(ReplayError, match="found -1"):
        storage.gather([-1])
    out = storage.gather([0, 1])
    with pytest.raises(ReplayError, match="'obs'"):
        storage.gather([0, 1, 2], out=out)
    storage.close()
    storage.close()
    with pytest.raises(ReplayError, match="closed"):
        storage.gather([0])


def test_a_restored_storage_goes_on_where_it_was(make_storage):
    storage = make_storage(SPEC, 10)
    storage.insert(rows(0, 8))
    storage.insert(rows(8, 5))
    saved = {name: column.copy() for name, column in storage.columns.items()}
    other = make_storage(SPEC, 10)
    other.restore(saved, size=storage.size, cursor=storage.cursor, inserted=storage.inserted)
    assert_rows(other.gather(np.arange(10)), {n: on_host(c) for n, c in storage.gather(np.arange(10)).items()})
    assert np.array_equal(other.insert(rows(0, 3)), storage.insert(rows(0, 3)))


def test_a_place_that_cannot_be_is_refused():
    storage = DataStorage(SPEC, 10)
    for place in ({"size": 4, "cursor": 5, "inserted": 4}, {"size": 4, "cursor": 4, "inserted": 3}):
        with pytest.raises(ReplayError, match="cannot have size=4"):
            storage.restore(rows(0, 10), **place)


def test_checkpoint_views_cannot_be_written_to():
    columns = DataStorage(SPEC, 10).columns
    with pytest.raises(ValueError, match="read-only"):
        columns["obs"][0] = 1


def test_a_replay_beyond_memory_is_refused_with_numbers(make_storage, monkeypatch):
    monkeypatch.setattr(memory, "_machine_free", lambda: 21_300_000_000)
    monkeypatch.setattr(memory, "group_memory", lambda: None)
    monkeypatch.setattr("pearl.backends.cuda.storage._device_free", lambda place: 21_300_000_000)
    images = TransitionSpec((FieldSpec("obs", (84, 84, 4), "uint8"), FieldSpec("next_obs", (84, 84, 4), "uint8")))
    with pytest.raises(
        CapacityError,
        match=r"Replay of 1,000,000 transitions of 56\.4 KB each needs 56\.4 GB; 21\.3 GB of memory are free\. Lower",
    ):
        make_storage(images, 1_000_000)


def test_rows_that_the_gpu_has_no_room_for_stay_in_the_hosts_memory(monkeypatch, caplog):
    from pearl.backends.cuda.storage import CudaDataStorage

    monkeypatch.setattr("pearl.backends.cuda.storage._device_free", lambda place: 1000)
    storage = CudaDataStorage(SPEC, 50, CUDA)
    assert storage.memory == "pinned"
    assert "kept in the host's memory" in caplog.text
    with pytest.raises(CapacityError, match="memory are free"):
        CudaDataStorage(SPEC, 50, CUDA, memory="device")
    with pytest.raises(ConfigurationError, match=r"""must be "auto", "device" or "pinned"; found 'mapped'"""):
        CudaDataStorage(SPEC, 50, CUDA, memory="mapped")


def test_a_gpu_that_is_not_there_is_named():
    from pearl.backends.cuda.storage import CudaDataStorage, TorchDataStorage

    for make in (CudaDataStorage, TorchDataStorage):
        with pytest.raises(DeviceError, match=r"A Data Storage on cuda:99 cannot be made: .+`pearl devices`"):
            make(SPEC, 50, "cuda:99")
    with pytest.raises(ReplayError, match="must be a whole number; found '50'"):
        CudaDataStorage(SPEC, "50", CUDA)


def test_memory_is_committed_only_when_written():
    resource = pytest.importorskip("resource")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows_of_1_kb = TransitionSpec((FieldSpec("obs", (1000,), "uint8"),))
    storage = DataStorage(rows_of_1_kb, min(1_000_000, memory.free_memory() // 2000))
    storage.insert({"obs": np.ones((10, 1000), np.uint8)})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # KB
