"""Weights on their way to engines in other processes: whatever goes wrong is found on that push, and named."""

import os
import re
import signal
import time
from concurrent.futures import Future
from contextlib import closing
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import loop_control
import pytest
import torch
from loop_control import Reads
from transformers import AutoModelForCausalLM

from grpo_rl.engines.base import EngineDeadError
from grpo_rl.engines.fingerprint import digest, fingerprint
from grpo_rl.testing import ScriptedEngine
from grpo_rl.weights import push, remote
from grpo_rl.weights.push import WeightDeliveryError, WeightSync
from grpo_rl.weights.shared_memory import SharedMemory, SharedMemoryTransport


class Silent(Reads):
    """Does not answer one of the calls."""

    def __init__(self, method, name="engine 1"):
        super().__init__(name)
        self.method = method

    def submit(self, method, *args):
        return Future() if method == self.method else super().submit(method, *args)


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = [torch.nn.Linear(30, 20), torch.nn.Linear(20, 500), torch.nn.Linear(500, 3)]
    return torch.nn.Sequential(*layers).bfloat16()


@pytest.mark.parametrize(("bucket_bytes", "most"), [(1 << 8, 2 * (1000 + 256)), (1 << 12, 1 << 12), (1 << 20, 1 << 20)])
def test_engines_hold_what_was_sent_through_no_more_than_the_buckets_or_two_rows(model, bucket_bytes, most):
    assert max(parameter.nbytes for parameter in model.parameters()) == 20_000  # in rows of up to 1,000
    engines = [Reads("engine 0"), Reads("engine 1")]
    transport = SharedMemoryTransport(engines, bucket_bytes)
    sync = WeightSync(model, transport)
    assert [sync.push(), sync.push()] == [1, 2]
    for engine in engines:
        for name, parameter in model.named_parameters():
            assert torch.equal(engine.weights[name], parameter)
        assert bucket_bytes <= engine.largest <= most
    transport.close()


def test_all_pause_before_the_first_tensor_and_go_on_after_the_proof(model):
    transport = SharedMemoryTransport([engine := Reads()], 1 << 20)
    WeightSync(model, transport).push()
    ends = ["finish_weight_update", "fingerprints", "weight_version", "resume"]
    assert engine.calls == ["pause", "start_weight_update", "update_weights", *ends]


@pytest.mark.parametrize(
    ("flips", "message"),
    [
        (True, r"engine 1 holds version 1, and 1 of 6 tensors differ .*\(1\.bias\)"),
        (False, "version 1 did not arrive: engine 1 holds version 0"),
    ],
)
def test_engines_stay_paused_where_the_proof_fails(model, flips, message):
    class Wrong(Reads):
        def finish_weight_update(self, version):
            if flips:
                super().finish_weight_update(version)
                self.weights["1.bias"].view(torch.int16)[7] ^= 1

    engines = [Reads(), Wrong("engine 1")]
    with pytest.raises(WeightDeliveryError, match=message):
        WeightSync(model, SharedMemoryTransport(engines)).push()
    assert all("resume" not in engine.calls for engine in engines)


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("pause", "a pause"),
        ("update_weights", "bucket 0 of version 1, 0.weight"),
        ("finish_weight_update", "the end of"),
        ("fingerprints", "the proof"),
    ],
)
def test_an_engine_that_never_answers_is_named_when_the_deadline_is_over(model, method, what):
    transport = SharedMemoryTransport([Reads(), Silent(method)], deadline_s=0.2)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"^engine 1 did not answer within 0.2 s \({what}"):
        WeightSync(model, transport).push()
    assert time.monotonic() - start < 10


def test_an_update_that_fails_is_given_up_and_the_next_push_arrives(model):
    class FailsOnce(Reads):
        failed = False

        def update_weights(self, bucket):
            if not self.failed:
                self.failed = True
                raise RuntimeError("no memory left")
            super().update_weights(bucket)

    engine = FailsOnce()
    sync = WeightSync(model, SharedMemoryTransport([engine]))
    with pytest.raises(WeightDeliveryError, match=r"engine 0 failed at bucket 0 of version 1, .*: no memory left"):
        sync.push()
    assert engine.calls[-1] == "abandon_weight_update"
    assert sync.push() == 2


class Proves(Reads):
    """Answers with digests, unless it is to read back."""

    proves_bytes = True

    def fingerprints(self, shapes, read_back=False):
        mark = fingerprint if read_back else digest
        return {name: mark(self.weights[name]) for name in shapes}


def test_what_a_push_is_told_and_what_is_read_back_are_two_things(model, monkeypatch):
    class Notes(Proves):
        """Answers with notes of what came, unless it is to read back."""

        def fingerprints(self, shapes, read_back=False):
            if not read_back:
                self.notes = super().fingerprints(shapes)
                self.weights["1.bias"].view(torch.int16)[7] ^= 1  # after the note was taken
                return self.notes
            return super().fingerprints(shapes, read_back)

    monkeypatch.setattr(remote, "READ_AT_ONCE", 4)
    sync = WeightSync(model, SharedMemoryTransport([engine := Notes()]))
    sync.push()
    engine.calls.clear()
    with pytest.raises(WeightDeliveryError, match=r"1 of 6 tensors .*\(1\.bias\)"):
        sync.verify()
    assert engine.calls == ["fingerprints", "fingerprints", "weight_version"]  # of 4 and of 2 tensors


class Receives:
    """The receiving end as a worker has it, which loads into nothing."""

    def __init__(self):
        pytest.importorskip("vllm")
        from grpo_rl.engines.vllm.shared_transfer import SharedMemoryEngine

        config = SimpleNamespace(parallel_config=None, model_config=None)
        self.end = SharedMemoryEngine(None, config, torch.device("cpu"), torch.nn.Linear(2, 2))
        self.end._load = lambda weights: None
        self.memory = SharedMemory(1 << 12)

    def update(self, tensors, names):
        self.memory.write(0, torch.tensor([3, 0]))
        bucket = {"path": self.memory.path, "key": self.memory.key, "size": self.memory.size, "start": 0, "number": 0}
        self.end.start_weight_update()
        self.end.update_weights(bucket | {"version": 3, "tensors": tensors, "names": names})
        self.end.finish_weight_update()


@pytest.mark.parametrize(
    ("count", "names", "message"),
    [
        (16, ["w"], r"version 3 did not come whole: 1 of 1 tensors are missing \(w from value 16 on\)"),
        (32, ["w", "v"], r"version 3 did not come whole: 1 of 2 tensors are missing \(v\)"),
        (32, None, "version 3 did not come whole: its last bucket is missing"),
    ],
)
def test_an_update_that_ends_too_early_is_refused_and_says_what_is_missing(count, names, message):
    with pytest.raises(RuntimeError, match=message):
        Receives().update([["w", "bfloat16", [8, 4], 64, 0, count]], names)
    Receives().update([["w", "bfloat16", [8, 4], 64, 0, 32]], ["w"])  # whole
    Receives().update([], [])


def test_on_a_gpu_later_updates_are_written_over_what_vllm_has_loaded():
    receives = Receives()
    receives.end.model.bfloat16()
    del receives.end._load  # the real one
    receives.end._in_place = True
    receives.memory.write(64, expected := torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16())
    place = receives.end.model.weight.data_ptr()
    receives.update([["weight", "bfloat16", [2, 2], 64, 0, 4]], ["weight"])
    assert torch.equal(receives.end.model.weight, expected) and receives.end.model.weight.data_ptr() == place


@pytest.mark.filterwarnings("error")
def test_an_engine_reads_the_trainers_memory_and_nothing_else(tmp_path):
    pytest.importorskip("vllm")
    from grpo_rl.engines.shared_memory import trainers_memory

    memory = SharedMemory(1 << 12)
    theirs = trainers_memory(memory.path, memory.size)
    memory.write(64, torch.tensor([5, 6]))
    assert theirs[64:80].view(torch.int64).tolist() == [5, 6]
    with pytest.raises(RuntimeError, match="grpo_rl weights .* of 4096 bytes, and not the trainer's memory of 8192"):
        trainers_memory(memory.path, 8192)
    (other := tmp_path / "other").write_bytes(b"x" * 10)
    with pytest.raises(RuntimeError, match=r"other of 10 bytes.*4096: shared memory reaches .* own machine"):
        trainers_memory(str(other), 4096)
    assert other.read_bytes() == b"x" * 10
    with pytest.raises(RuntimeError, match="No such file.*: shared memory reaches"):
        trainers_memory(str(tmp_path / "gone"), 4096)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:grpo_rl weights" in line]
    assert any(" r--s " in line for line in maps)
    memory.close()
    assert not os.path.exists(memory.path) or "grpo_rl" not in os.readlink(memory.path)


# From here on, real vLLM with a tiny model.

BIASED = "model.layers.1.self_attn.k_proj.weight"  # in the middle of a layer that vLLM fuses
TABLE = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def served(tiny_model):
    pytest.importorskip("vllm")
    from grpo_rl.engines.vllm.asynchronous import AsyncVLLMEngine

    engine = AsyncVLLMEngine(tiny_model, max_model_len=64, name="engine 0", deadline_s=20.0)
    with loop_control.served(engine) as control:
        yield control


def moved(tiny_model, seed):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


class Tampered(SharedMemoryTransport):
    """Something happens between writing a bucket and loading it."""

    def __init__(self, tamper, *args, **settings):
        super().__init__(*args, **settings)
        self.tamper = tamper

    def submit(self, method, *args):
        if method == "update_weights":
            self.tamper(self._memory, args[0])
        return super().submit(method, *args)


def version_of(served):
    return served.submit("weight_version").result(20)


def corrupt(memory, bucket):
    for name, _, _, start, *_ in bucket["tensors"]:
        if name == BIASED:
            memory._bytes[start + 1] ^= 1


def lose(memory, bucket):
    bucket["tensors"] = [entry for entry in bucket["tensors"] if entry[0] != BIASED]


def lose_a_part(memory, bucket):
    if bucket["number"] == 1:  # the first bucket has 63 of its rows
        bucket["tensors"] = [entry for entry in bucket["tensors"] if entry[0] != TABLE]


def mark_as_earlier(memory, bucket):
    memory.write(bucket["start"], torch.tensor([bucket["version"] - 1, bucket["number"]]))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (corrupt, rf"engine 0 holds version VERSION, and 1 of \d+ tensors .*\({BIASED}\)"),
        (lose, rf"engine 0 failed at .*1 of \d+ tensors are missing \({BIASED}"),
        (lose_a_part, rf"engine 0 failed at bucket 2 .*values 4032 to 8064 of {TABLE} are"),
        (mark_as_earlier, r"bucket 0 of version VERSION was announced, .* holds bucket 0 of version BEFORE"),
    ],
)
def test_what_is_corrupt_missing_or_late_is_found_on_that_push_and_named(served, tiny_model, tamper, message):
    served.submit("resume").result(20)
    version = version_of(served)
    transport = Tampered(lambda memory, bucket: None, [served], 1 << 14, deadline_s=20.0)
    sync = WeightSync(model := moved(tiny_model, 9), transport, version)
    sync.push()
    message = message.replace("VERSION", str(version + 2)).replace("BEFORE", str(version + 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05)
    transport.tamper = tamper
    with pytest.raises(WeightDeliveryError, match=message):
        sync.push()
    assert version_of(served) == version + (2 if tamper is corrupt else 1)
    transport.tamper = lambda memory, bucket: None
    WeightSync(model, transport, version_of(served)).push()  # what was given up does not stand in the way
    transport.close()


@pytest.mark.nightly
@pytest.mark.parametrize("bucket_bytes", [1 << 13, 1 << 16, 1 << 24])
def test_vllm_holds_what_was_sent_through_buckets_that_cut_its_layers(served, tiny_model, bucket_bytes):
    transport = SharedMemoryTransport([served], bucket_bytes, deadline_s=20.0)
    for seed in (1, 2):
        sync = WeightSync(moved(tiny_model, seed), transport, version_of(served))
        sync.push()
        sync.verify()
    transport.close()


@pytest.mark.nightly
def test_an_engine_that_dies_in_the_middle_of_a_push_is_found_on_that_push_and_named(served, tiny_model):
    (pid,) = served._engine.pids

    def kill(memory, bucket):
        if bucket["number"] == 2:
            os.kill(pid, signal.SIGKILL)

    transport = Tampered(kill, [served], 1 << 13, deadline_s=20.0)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=rf"engine 0 \(process {pid}\) died .* \(bucket \d of version \d+, "):
        WeightSync(moved(tiny_model, 6), transport, 0).push()
    assert time.monotonic() - start < 10


def test_vllm_gets_to_know_the_transfer_by_the_entry_point_that_is_installed():
    pytest.importorskip("vllm")
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    setup = (Path(__file__).parents[2] / "setup.py").read_text()
    (value,) = re.findall(r'"vllm.general_plugins": \["grpo_rl_shared_memory = (.+)"\]', setup)
    register = EntryPoint("grpo_rl_shared_memory", value, "vllm.general_plugins").load()
    for _ in range(2):  # vLLM may call it more than once
        register()
    made = WeightTransferEngineFactory._registry["grpo_rl_shared_memory"]()
    assert made.__name__ == "SharedMemoryEngine"


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("bucket_bytes", [1 << 14, 1 << 24])
def test_weights_arrive_through_the_memory_of_a_gpu_that_both_share(tiny_model, bucket_bytes):
    from grpo_rl.engines.vllm.asynchronous import AsyncVLLMEngine

    engine = AsyncVLLMEngine(tiny_model, max_model_len=64, gpu_memory_utilization=0.2, transfer="ipc")
    device = torch.device("cuda", 0)
    with (
        loop_control.served(engine) as control,
        closing(SharedMemoryTransport([control], bucket_bytes, 20.0, device)) as transport,
    ):
        for seed in (1, 2, 3):  # from the second push on weights are written in place
            sync = WeightSync(moved(tiny_model, seed).to(device), transport, seed - 1)
            assert sync.push() == seed
            sync.verify()


@pytest.fixture
def one_gpu(monkeypatch):
    """CUDA's handles, played by a table of this process: the memory itself is the host's."""
    opened: dict[bytes, torch.Tensor] = {}

    def reduce(memory):
        opened[handle := f"handle {len(opened)}".encode()] = memory
        return None, (torch.Tensor, None, None, 0, torch.TypedStorage, torch.uint8, 3, handle, memory.nbytes, 0, False)

    def rebuild(kind, size, stride, offset, storage, dtype, device, handle, *rest):
        if handle not in opened:
            raise RuntimeError("CUDA error: invalid resource handle")
        return opened[handle]

    monkeypatch.setattr("grpo_rl.engines.shared_memory.reduce_tensor", reduce)
    monkeypatch.setattr("grpo_rl.engines.shared_memory.rebuild_cuda_tensor", rebuild)
    return opened


def test_a_gpus_memory_is_opened_by_a_handle_that_vllms_messages_carry(model, one_gpu):
    pytest.importorskip("vllm")
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    class Worker(Reads):
        """Loads what came in a message, as a worker does."""

        def __init__(self):
            super().__init__()
            self.receives = Receives()
            self.receives.end._load = lambda weights: self.weights.update(
                {name: tensor.clone() for name, tensor in weights}
            )

        def start_weight_update(self):
            self.receives.end.start_weight_update()

        def update_weights(self, bucket):
            assert not bucket["path"]
            self.receives.end.update_weights(MsgpackDecoder().decode(MsgpackEncoder().encode(bucket)))

        def finish_weight_update(self, version):
            self.receives.end.finish_weight_update()
            super().finish_weight_update(version)

    transport = SharedMemoryTransport([engine := Worker()], 1 << 12, device=torch.device("cpu"))
    sync = WeightSync(model, transport)
    assert [sync.push(), sync.push()] == [1, 2] and len(one_gpu) == 1
    for name, parameter in model.named_parameters():
        assert torch.equal(engine.weights[name], parameter)
    transport.close()


def test_memory_of_another_gpu_is_refused_with_the_way_through_the_host(one_gpu):
    from grpo_rl.engines.shared_memory import trainers_gpu_memory

    message = "can't be opened on cuda:0 .*invalid resource.*transfer=shared_memory takes the way through the host"
    with pytest.raises(RuntimeError, match=message):
        trainers_gpu_memory([b"gone", 8, 0, False], 8, torch.device("cuda", 0))


@pytest.mark.parametrize("broken", range(6))
def test_the_bucket_that_failed_is_named_and_not_the_one_behind_it(model, broken):
    class Breaks(Reads):
        """Behaves as vLLM: after an error the update is over, and later buckets are refused."""

        failed = False

        def update_weights(self, bucket):
            if self.failed:
                raise RuntimeError("start_weight_update must be called before update_weights")
            if bucket["number"] == broken:
                self.failed = True
                raise RuntimeError("no memory is left")
            super().update_weights(bucket)

    with pytest.raises(WeightDeliveryError, match=rf"bucket {broken} of version 1, .*: no memory is left"):
        WeightSync(model, SharedMemoryTransport([Breaks()], 1 << 13)).push()


def test_engines_that_answer_with_digests_are_compared_by_digests_also_where_fingerprints_come_in_batches(monkeypatch):
    monkeypatch.setattr(push, "batch_on", lambda device: SimpleNamespace(add=lambda tensor: 7))
    tensor, proofs = torch.arange(12.0), push.PushProofs()
    assert proofs.number("weight", tensor, by_bytes=True) == digest(tensor)
    assert proofs.number("weight", tensor, by_bytes=False) == 7


def test_a_push_that_fails_leaves_the_engine_new_and_none_of_its_tensors_held():
    sent = push.InProcess(ScriptedEngine(lambda prompt, index: []))
    with pytest.raises(RuntimeError), sent.paused():
        during = sent._proofs
        raise RuntimeError
    assert sent._proofs is not during
    with sent.paused() as is_new:
        assert is_new


def test_a_push_leaves_the_engine_a_core_and_takes_it_back_however_it_ends():
    class Notes(Reads):
        def update_weights(self, bucket):
            seen.append(torch.get_num_threads())
            super().update_weights(bucket)
            if len(seen) > 1:
                raise RuntimeError("no room")

    before, seen = torch.get_num_threads(), []
    transport = SharedMemoryTransport([Notes()], 1 << 12)
    try:
        torch._C.set_num_threads(3)
        transport.send([("w", torch.ones(4, dtype=torch.bfloat16))], 1)
        assert torch.get_num_threads() == 3
        with pytest.raises(WeightDeliveryError, match="no room"):
            transport.send([("w", torch.ones(4, dtype=torch.bfloat16))], 2)
        assert seen == [2, 2] and torch.get_num_threads() == 3
    finally:
        torch._C.set_num_threads(before)
        transport.close()


def test_engines_of_different_kinds_are_refused():
    other = Reads()
    other.dtype = torch.float32
    with pytest.raises(AssertionError, match="2 of "):
        SharedMemoryTransport([Reads(), other])
