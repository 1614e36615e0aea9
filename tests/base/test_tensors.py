"""safetensors files: bytes are those of safetensors; what is wrong with a file is said before it is read."""

import errno
import json
import os
import resource
import shutil
import tracemalloc
from io import FileIO
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save_file

from fluxq.base import devices
from fluxq.base import tensors as files
from fluxq.base.files import sha256_file
from fluxq.base.tensors import DTYPES, TensorFile, join_weights, save_sealed, save_weights

NAMES = ["a", "b.weight", "é", 'quote"', "back\\slash", "line\nbreak", "\x01", "\x7f", "\u2028", "日本", "", " "]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(as_bytes(one), as_bytes(other))


def drawn(word: str, *shape: int) -> torch.Tensor:
    name, width = DTYPES[word]
    data = torch.randint(0, 2, (*shape, width), dtype=torch.uint8)
    return data.view(getattr(torch, name)).reshape(shape)


def packed(header: object, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_every_dtype_is_written_as_safetensors_writes_it_and_read_again(tmp_path):
    held = {f"tensor {word}": drawn(word, 3, 5) for word in reversed(DTYPES)}
    held |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 7), "first": drawn("F32", 4)}
    save_weights(held, tmp_path / "ours", {"format": "pt"})
    save_file(held, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    stored = TensorFile(tmp_path / "ours")
    assert stored.metadata() == {"format": "pt"} and set(stored.keys()) == held.keys()
    assert all(same(stored.get_tensor(name), tensor) for name, tensor in held.items())
    assert stored.nbytes == sum(t.nbytes for t in held.values())
    assert all(entry.begin % DTYPES[entry.dtype][1] == 0 for entry in stored.stored.values())


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(NAMES) | st.text(st.characters(codec="utf-8"), max_size=6),
        st.tuples(st.sampled_from(list(DTYPES)), st.lists(st.integers(0, 4), max_size=4)),
        max_size=8,
    ),
    st.none() | st.text(st.characters(codec="utf-8"), max_size=9),
)
def test_whatever_the_tensors_are_called_the_bytes_are_those_of_safetensors(tmp_path_factory, described, text):
    folder = tmp_path_factory.mktemp("any")
    held = {name: drawn(word, *shape) for name, (word, shape) in described.items() if name != "__metadata__"}
    metadata = {} if text is None else {"note": text}
    save_weights(held, folder / "ours", metadata)
    save_file(held, folder / "theirs", metadata or None)
    assert (folder / "ours").read_bytes() == (folder / "theirs").read_bytes()
    if not all(name.isprintable() for name in held):  # written byte for byte, and never read: it would forge a line
        with pytest.raises(ValueError, match="with characters that are not printed"):
            TensorFile(folder / "theirs")
        return
    stored = TensorFile(folder / "theirs")
    assert stored.metadata() == metadata and all(same(stored.get_tensor(name), t) for name, t in held.items())


def test_tensors_that_share_memory_or_lie_apart_are_written_as_they_look(tmp_path):
    whole = torch.arange(24.0).reshape(4, 6)
    held = {"whole": whole, "same": whole, "transposed": whole.T, "columns": whole[:, ::2]}
    save_weights(held, tmp_path / "file", {})
    found = load_file(tmp_path / "file")
    assert all(torch.equal(found[name], tensor) for name, tensor in held.items())


def test_several_words_of_metadata_keep_their_order(tmp_path):
    """safetensors' own writer puts them in another order each time."""
    save_weights({}, tmp_path / "file", {"b": "1", "a": "2"})
    assert (tmp_path / "file").read_bytes()[8:].startswith(b'{"__metadata__":{"b":"1","a":"2"}}')


BIG = 1 << 70
DAMAGED = {  # what a file holds -> words of the message
    "nothing": (b"", "0 bytes are no header"),
    "half a length": (b"\x08\x00\x00", "3 bytes are no header"),
    "a longer header than file": (packed({})[:8] + b"{", "its header would be 2 bytes, and 1 follow"),
    "a header of exabytes": (b"\xff" * 8 + b"{}", "more than the 10000000 that are read"),
    "no JSON": (packed(b"{a: 1}"), "Expecting property name"),
    "a list": (packed([]), "is not a JSON object"),
    "space before": (packed(b" {}"), "is not a JSON object"),
    "UTF-16": (packed("{}".encode("utf-16")), "is not a JSON object"),
    "no UTF-8": (packed(b'{"\xff": 1}'), "invalid start byte"),
    "half a surrogate": (packed(b'{"\\ud800": {}}'), "surrogates not allowed"),
    "deep nesting": (packed(b'{"a":' * 100_000), "nested too deeply"),
    "a number without end": (packed(b'{"a": ' + b"9" * 5000 + b"}"), "integer string conversion"),
    "one name twice": (packed(b'{"a": 1, "a": 2}'), "names 'a' twice"),
    "one key twice": (packed(b'{"a": {"dtype": "U8", "dtype": "U8"}}'), "names 'dtype' twice"),
    "metadata that is no text": (packed({"__metadata__": {"a": 1}}), "__metadata__ is not text"),
    "metadata that is a list": (packed({"__metadata__": []}), "__metadata__ is not text"),
    "a tensor that is a number": (packed({"a": 1}), "'a': the header does not say dtype"),
    "no offsets": (packed({"a": {"dtype": "U8", "shape": []}}), "'a': the header does not say dtype"),
    "a fourth key": (packed({"a": {**entry(), "extra": 1}}, b"\0" * 8), "and those alone"),
    "an unknown dtype": (packed({"a": entry("F3")}, b"\0" * 8), "'a': dtype 'F3' is none of U64, "),
    "a dtype that is a list": (packed({"a": entry(["F32"])}, b"\0" * 8), "'a': dtype ['F32'] is none of"),
    "a shape that is a number": (packed({"a": {**entry(), "shape": 2}}, b"\0" * 8), "'a': shape 2 is no list"),
    "a negative size": (packed({"a": entry(shape=[-2])}, b"\0" * 8), "'a': shape [-2] is no list of sizes"),
    "half a size": (packed({"a": entry(shape=[2.0])}, b"\0" * 8), "'a': shape [2.0] is no list of sizes"),
    "a true size": (packed({"a": entry("U64", shape=[True])}, b"\0" * 8), "'a': shape [True] is no list of sizes"),
    "one offset": (packed({"a": entry(offsets=[8])}, b"\0" * 8), "'a': data_offsets [8] are no beginning and end"),
    "negative offsets": (packed({"a": entry(offsets=[-8, 0])}, b"\0" * 8), "'a': data_offsets [-8, 0] are no"),
    "offsets that go back": (packed({"a": entry(offsets=[8, 0])}, b"\0" * 8), "'a': data_offsets [8, 0] are no"),
    "too few bytes": (packed({"a": entry(offsets=[0, 4])}, b"\0" * 4), "'a': F32 [2] takes 8 bytes, data_offsets give"),
    "more than any memory": (packed({"a": entry(shape=[BIG], offsets=[0, 4 * BIG])}), "'a': a shape of more than"),
    "nothing times all": (packed({"a": entry(shape=[0, BIG, BIG], offsets=[0, 0])}), "'a': a shape of more than"),
    "an endless product": (packed({"a": entry(shape=[BIG] * 50_000, offsets=[0, 0])}), "'a': a shape of more than"),
    "an end outside": (packed({"a": entry()}, b"\0" * 7), "'a': ends at byte"),
    "a hole before": (packed({"a": entry(offsets=[4, 12])}, b"\0" * 12), "'a': leaves a hole before it"),
    "a hole between": (packed({"a": entry(), "b": entry(offsets=[12, 20])}, b"\0" * 20), "'b': leaves a hole"),
    "an overlap": (packed({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12), "'b': overlaps the one before"),
    "the same bytes twice": (packed({"a": entry(), "b": entry()}, b"\0" * 8), "'b': overlaps the one before"),
    "bytes behind": (packed({"a": entry()}, b"\0" * 9), "1 bytes follow the last tensor"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_by_name_with_a_cure(tmp_path, case):
    path = tmp_path / "file.safetensors"
    data, words = DAMAGED[case]
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as caught:
            TensorFile(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(f"{path}: truncated or damaged safetensors file (") and message.endswith("copy it again")
    assert words in message
    assert peak < 1_000_000 + 40 * len(data)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_what_is_accepted_is_what_safetensors_accepts(tmp_path_factory, data):
    """Of a good file with some bytes changed, cut off or added: the same tensors, or a ValueError."""
    path = tmp_path_factory.mktemp("fuzz") / "file"
    save_weights({"a": torch.arange(3.0), "bc": torch.arange(4, dtype=torch.int8)}, path, {"k": "v"})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(0, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] = data.draw(st.sampled_from(b'0123456789"[]{},:. \0\xffFUI') | st.integers(0, 255))
    content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    path.write_bytes(content)
    try:
        found = {name: TensorFile(path).get_tensor(name) for name in TensorFile(path).keys()}
    except ValueError:
        return
    theirs = load(bytes(content))  # raises if it sees what we did not
    assert found.keys() == theirs.keys() and all(same(found[name], theirs[name]) for name in found)


def test_safetensors_itself_refuses_what_we_refuse():
    """All but what it is more lenient about than the format's description."""
    ours_alone = {"a fourth key", "space before"}
    for case, (content, _) in DAMAGED.items():
        if case not in ours_alone:
            with pytest.raises((SafetensorError, ValueError)):
                load(content)


def test_a_file_that_is_replaced_while_it_is_read_is_noticed(tmp_path):
    path = tmp_path / "file"
    save_weights({"a": torch.zeros(1000)}, path, {})
    stored = TensorFile(path)
    save_weights({"a": torch.ones(1001)}, path, {})
    with pytest.raises(RuntimeError, match="replaced or written to while it was read"):
        stored.get_tensor("a")
    stored = TensorFile(path)
    os.truncate(path, 2000)
    with pytest.raises(RuntimeError, match="replaced or written to while it was read; start again"):
        stored.get_tensor("a")
    path.unlink()
    with pytest.raises(FileNotFoundError, match=r"cannot be read \(No such file or directory\); run this again"):
        stored.get_tensor("a")


def test_a_pipe_is_not_waited_for(tmp_path):
    save_weights({"a": torch.ones(4)}, tmp_path / "a", {})
    opened = TensorFile(tmp_path / "a")
    (tmp_path / "a").unlink()
    os.mkfifo(tmp_path / "a")
    for read in (lambda: TensorFile(tmp_path / "a"), lambda: opened.get_tensor("a"), lambda: opened.fingerprint("a")):
        with pytest.raises(ValueError, match=r"a: .*it is no regular file"):
            read()


def test_a_sealed_file_is_of_its_place(tmp_path):
    """Of another block, another job's, and of a work folder that was moved as a whole."""
    places = [f".out.{job}.work/transformer/000{index}.safetensors" for job, index in (("0", 0), ("0", 1), ("1", 0))]
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    save_sealed({"a": torch.ones(4)}, tmp_path / places[0], {})
    for place in places[1:]:
        shutil.copyfile(tmp_path / places[0], tmp_path / place)
        with pytest.raises(ValueError, match="damaged since it was written"):
            TensorFile(tmp_path / place).require_as_written()
    shutil.copytree(tmp_path, tmp_path / "moved", ignore=shutil.ignore_patterns("moved"))
    TensorFile(tmp_path / "moved" / places[0]).require_as_written()


@pytest.mark.parametrize(
    ("old", "new"), [(b'"I8"', b'"U8"'), (b"[4,2]", b"[2,4]"), (b"\x01\x02", b"\x02\x01"), (b'"said"', b'"sold"')]
)
def test_a_sealed_file_that_was_changed_is_noticed(tmp_path, old, new):
    """Its numbers, their dtype, their shape, and what the header says of them."""
    path = tmp_path / "x.safetensors"
    save_sealed({"a": torch.arange(8, dtype=torch.int8).view(4, 2)}, path, {"said": "yes"})
    TensorFile(path).require_as_written()
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    with pytest.raises(ValueError, match=r"x\.safetensors: damaged since it was written"):
        TensorFile(path).require_as_written()


def test_a_tensor_that_is_not_there_is_named(tmp_path):
    save_weights({"a": torch.zeros(1)}, tmp_path / "file", {})
    with pytest.raises(ValueError, match="holds no tensor 'b'"):
        TensorFile(tmp_path / "file").get_tensor("b")


def test_a_dtype_that_the_format_lacks_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"hold no torch\.complex128"):
        save_weights({"a": torch.zeros(1, dtype=torch.complex128)}, tmp_path / "file", {})


def test_a_file_made_of_parts_of_others_is_the_one_that_is_written_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_AT_ONCE", 100)
    held = {f"tensor {word}": drawn(word, 30, 7) for word in DTYPES}
    parts = {}
    for at in range(3):
        path = tmp_path / f"part {at}"
        save_weights({name: held[name] for name in list(held)[at::3]}, path, {"part": str(at)})
        parts |= {name: (path, stored) for name, stored in TensorFile(path).stored.items()}
    join_weights(parts, tmp_path / "joined", {"format": "pt"})
    save_weights(held, tmp_path / "whole", {"format": "pt"})
    assert (tmp_path / "joined").read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_part_that_was_cut_short_since_is_noticed(tmp_path):
    save_weights({"a": torch.zeros(1000)}, tmp_path / "part", {})
    parts = {"a": (tmp_path / "part", TensorFile(tmp_path / "part").stored["a"])}
    os.truncate(tmp_path / "part", 2000)
    with pytest.raises(ValueError, match=r"part: ends \d+ bytes too early"):
        join_weights(parts, tmp_path / "joined", {})


def test_a_file_that_cannot_be_written_is_named_and_room_is_told_of_only_where_it_lacks(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match=r"cannot write taken \(.*\)$"):
        save_weights({"a": torch.zeros(1)}, tmp_path / "taken", {})


def test_a_read_takes_no_more_memory_than_the_tensor(tmp_path):
    """The pages of a mapped file would count as memory of this process, too."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("Linux says how much memory a process holds")

    def held() -> int:
        return 1024 * int(next(line for line in status.read_text().splitlines() if "VmRSS" in line).split()[1])

    path, count = tmp_path / "file", 24
    save_weights({str(index): torch.zeros(1 << 22, dtype=torch.uint8) for index in range(count)}, path, {})
    stored = TensorFile(path)
    stored.get_tensor("0")
    before = held()
    for name in stored.keys():
        assert not stored.get_tensor(name).any()
    assert held() - before < 3 << 22


def test_for_a_while_memory_of_large_tensors_is_used_again_when_they_are_gone(tmp_path):
    large = {name: torch.full((600, 1000), value, dtype=torch.float32) for name, value in (("a", 1.0), ("b", 2.0))}
    save_weights(large, tmp_path / "x.safetensors", {})
    file = TensorFile(tmp_path / "x.safetensors")
    with devices.used_again():
        first = file.get_tensor("a")
        view, place = first[10:], first.data_ptr()
        del first
        second = file.get_tensor("b")
        assert second.data_ptr() != place and (view == 1).all()  # a view keeps it
        del view
        again = file.get_tensor("a")
        assert again.data_ptr() == place and (second == 2).all() and (again == 1).all()
        assert again.untyped_storage().nbytes() == again.nbytes
    assert (again == 1).all()
    del again
    assert not devices._FREE.blocks


@pytest.mark.parametrize("shape", [(0, 7), (3, 5), (700, 1000)])  # the last is more than a MiB
def test_memory_for_a_short_while_is_a_tensor_like_any_other(shape):
    tensor = devices.scratch(shape, torch.float32)
    tensor.fill_(2.0)
    assert tensor.shape == shape and tensor.is_contiguous() and (tensor.t() @ tensor == 4 * shape[0]).all()
    assert devices.scratch(shape, torch.bfloat16, "meta").is_meta


def test_little_memory_is_kept(monkeypatch):
    monkeypatch.setattr(devices, "_KEPT", 7 << 20)
    with devices.used_again():
        two, three, four = (devices.empty((size << 20,), torch.uint8) for size in (2, 3, 4))
        place = three.data_ptr()
        del two, four, three  # one after the other; the first is too much then
        assert sum(block.nbytes for block in devices._FREE.blocks.values()) == 7 << 20
        assert devices.empty((2 << 20,), torch.uint8).data_ptr() == place  # the smallest that holds it
        assert devices.empty((1 << 20,), torch.uint8).untyped_storage().nbytes() == 1 << 20


def test_large_files_go_to_the_disk_as_they_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LARGE", 1000)
    monkeypatch.setattr(files, "_BEHIND", 500)
    monkeypatch.setattr(files, "_AT_ONCE", 192)
    synced = []
    monkeypatch.setattr(os, "fdatasync", lambda file: synced.append(os.fstat(file).st_size), raising=False)
    tensors = {name: torch.randn(40, 8) for name in "abc"}
    save_weights(tensors, tmp_path / "apart.safetensors", {})
    whole = (tmp_path / "apart.safetensors").stat().st_size
    assert synced[0] < whole == synced[-1]
    held = TensorFile(tmp_path / "apart.safetensors")
    parts = {name: (held.path, held.stored[name]) for name in held.keys()}
    assert join_weights(parts, tmp_path / "joined", {}) == sha256_file(tmp_path / "joined") == sha256_file(held.path)
    assert synced[-1] == whole

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(os, "fdatasync", full, raising=False)
    for write in (lambda to: save_weights(tensors, to, {}), lambda to: join_weights(parts, to, {})):
        with pytest.raises(OSError, match=r"cannot write full \(.*no room\); .* GB are free"):
            write(tmp_path / "full")


def test_more_parts_are_joined_than_a_process_may_have_open(tmp_path):
    parts = {}
    for index in range(40):
        save_weights({"a": torch.full((4,), float(index))}, tmp_path / str(index), {})
        parts[f"{index:02}"] = (tmp_path / str(index), TensorFile(tmp_path / str(index)).stored["a"])
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 20, before[1]))
    try:
        join_weights(parts, tmp_path / "whole", {})
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert load_file(tmp_path / "whole")["39"].tolist() == [39.0] * 4


@pytest.mark.parametrize("when", ["opened", "read"])
def test_a_part_that_cannot_be_read_is_no_failure_of_writing(tmp_path, monkeypatch, when):
    """R11: what kind of trouble it was is kept, and the file is named that had it."""
    save_weights({"a": torch.ones(4)}, tmp_path / "part", {})
    stored = TensorFile(tmp_path / "part").stored["a"]

    class Failing(FileIO):
        def __init__(self, path: Path, mode: str = "r", opener=None) -> None:
            if when == "opened" and mode == "r":
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            super().__init__(path, mode, opener=opener)

        def readinto(self, _: object) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(files, "FileIO", Failing)
    with pytest.raises(OSError, match=r"cannot be read .*; run this again: '.*part'") as caught:
        join_weights({"a": (tmp_path / "part", stored)}, tmp_path / "whole", {})
    assert caught.value.errno == (errno.EMFILE if when == "opened" else errno.EIO)


def test_a_full_disk_is_told_by_its_number(tmp_path, monkeypatch):
    """R11: whoever calls can tell it from a disk that fails."""

    class Full(FileIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "FileIO", Full)
    with pytest.raises(OSError, match=r"cannot write full \(.*No space.*\); .* GB are free") as caught:
        save_weights({"a": torch.ones(4)}, tmp_path / "full", {})
    assert caught.value.errno == errno.ENOSPC
