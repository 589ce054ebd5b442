"""The Triton kernels equal plain PyTorch, in value and gradient: compiled where there is a GPU, else interpreted."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("triton", reason="Triton has no build for this platform")

from grpo_rl.data.group import Kept
from grpo_rl.policies import head
from grpo_rl.policies.head_triton import BLOCK, tile_gradient_, tile_statistics

pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARIES = [5, 128, BLOCK + 77, 2 * BLOCK]  # less than a block, a power of two, ragged, whole blocks
BF16_ERROR = 2**-8 if DEVICE == "cuda" else 2**-7  # the interpreter cuts off, hardware rounds
TRANSFORMS = [(1.0, None), (0.6, None), (1.0, 3.0), (1.7, 3.0)]


def plain(logits, target, temperature, softcap):
    """The definition, on the whole distribution at once."""
    z = (logits if softcap is None else softcap * torch.tanh(logits / softcap)) / temperature
    log_p, below = z.log_softmax(-1), z - z.amax(-1, keepdim=True)
    of_row = z.amax(-1), below.exp().sum(-1), (log_p.exp() * below).sum(-1)
    return log_p.gather(-1, target[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), *of_row


def tile(rows: int, vocabulary: int, dtype=torch.float64, spread: float = 2.0):
    g = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocabulary, generator=g, dtype=torch.float64) * spread).to(DEVICE, dtype)
    target = torch.randint(vocabulary, (rows,), generator=g)
    target[:2] = torch.tensor([0, vocabulary - 1])
    up = [torch.randn(rows, generator=g, dtype=torch.float64).to(DEVICE) for _ in range(2)]
    return logits, target.to(DEVICE), up


def plain_gradient(logits, target, up, temperature, softcap):
    leaf = logits.double().requires_grad_()
    log_prob, entropy, *_ = plain(leaf, target, temperature, softcap)
    return torch.autograd.grad((log_prob * up[0] + entropy * up[1]).sum(), leaf)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "softcap"), TRANSFORMS)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_statistics_and_gradient_equal_those_of_autograd_in_fp64(vocabulary, temperature, softcap):
    logits, target, up = tile(4, vocabulary)
    expected = plain(logits, target, temperature, softcap)
    statistics = tile_statistics(logits, target, temperature, softcap)
    torch.testing.assert_close(statistics, expected, rtol=0, atol=1e-12)
    expected_grad = plain_gradient(logits, target, up, temperature, softcap)
    _, _, *of_row = statistics
    grad = tile_gradient_(logits, target, *of_row, *up, temperature, softcap)
    assert grad.data_ptr() == logits.data_ptr()
    torch.testing.assert_close(grad, expected_grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("dtype", "grad_error"), [(torch.float32, 1e-5), (torch.bfloat16, BF16_ERROR)])
def test_rounding_is_that_of_the_tile_and_statistics_are_in_fp32(dtype, grad_error):
    logits, target, up = tile(3, BLOCK + 77, dtype)
    expected = plain(logits.double(), target, 0.8, 5.0)
    statistics = tile_statistics(logits, target, 0.8, 5.0)
    assert {x.dtype for x in statistics} == {torch.float32}
    torch.testing.assert_close(statistics, tuple(x.float() for x in expected), rtol=1e-6, atol=1e-5)
    expected_grad = plain_gradient(logits, target, up, 0.8, 5.0)
    _, _, *of_row = statistics
    grad = tile_gradient_(logits, target, *of_row, *(x.float() for x in up), 0.8, 5.0)
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), expected_grad, rtol=grad_error, atol=grad_error * 1e-3)


def test_huge_logits_neither_overflow_nor_lose_the_entropy():
    """Two tokens at 1e4 share the mass evenly: entropy log 2, which a difference of numbers near 1e4 would blur."""
    logits = torch.full((2, 300), -1e4, device=DEVICE)
    logits[:, [7, 290]] = 1e4
    target = torch.tensor([7, 3], device=DEVICE)
    log_prob, entropy, *of_row = tile_statistics(logits, target)
    log2 = torch.tensor(2.0).log().item()
    torch.testing.assert_close(entropy.cpu(), torch.full((2,), log2), rtol=0, atol=1e-6)
    torch.testing.assert_close(log_prob.cpu(), torch.tensor([-log2, -2e4 - log2]), rtol=1e-7, atol=1e-6)
    one = torch.ones(2, device=DEVICE)
    # p = 1/2 each; entropy's gradient is 0 at its greatest value.
    grad = tile_gradient_(logits, target, *of_row, one, one).cpu()
    assert grad.isfinite().all()
    torch.testing.assert_close(grad[0, [7, 290]], torch.tensor([0.5, -0.5]), rtol=0, atol=1e-6)
    torch.testing.assert_close(grad[1, [3, 7, 290]], torch.tensor([1.0, -0.5, -0.5]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shift", [-300.0, 0.0, 300.0])
def test_logits_far_from_zero_cost_no_digits(shift):
    """The same numbers in fp32 and fp64, so that all error is the kernels' own."""
    logits, target, up = tile(3, BLOCK + 77, torch.float32)
    logits += shift
    expected_grad = plain_gradient(logits, target, up, 1.0, None)
    log_prob, entropy, *of_row = tile_statistics(logits, target)
    for result, expected in zip((log_prob, entropy), plain(logits.double(), target, 1.0, None), strict=False):
        torch.testing.assert_close(result.double(), expected, rtol=0, atol=2e-6)
    grad = tile_gradient_(logits, target, *of_row, *(x.float() for x in up)).double()
    assert (grad - expected_grad).norm() <= 1e-6 * expected_grad.norm()


def test_tokens_that_a_model_masks_out_count_nothing():
    logits, target, up = tile(2, 50)
    logits[:, 1:49] = -torch.inf
    log_prob, entropy, *of_row = tile_statistics(logits, target)
    torch.testing.assert_close(log_prob, logits[:, [0, 49]].log_softmax(-1).diagonal(), rtol=0, atol=1e-12)
    p = logits[:, [0, 49]].softmax(-1)
    torch.testing.assert_close(entropy, -(p * p.log()).sum(-1), rtol=0, atol=1e-12)
    grad = tile_gradient_(logits, target, *of_row, *up)
    assert (grad[:, 1:49] == 0).all() and grad.isfinite().all()


def test_the_head_of_whole_rows_counts_kept_sets_alone(monkeypatch):
    """Two tokens a tile, so that a set is looked up in another tile than the first."""
    g = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=g, dtype=torch.float64).to(DEVICE) for shape in ((5, 4), (40, 4))]
    target = torch.tensor([3, 39, 0, 7, 7], device=DEVICE)
    up = [torch.randn(5, generator=g, dtype=torch.float64).to(DEVICE) for _ in range(2)]
    sets = [[3, 8, 20], [39], [], [30, 7], [7, 0, 1, 2]]
    monkeypatch.setattr(head, "GPU_TILE_LOGITS", 2 * 40)

    def results(road):
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = road(*leaves)
        return [*out, *torch.autograd.grad(sum((u * o).sum() for u, o in zip(up, out, strict=True)), leaves)]

    def of_the_kept_words(hidden, weight):
        rows = []
        for h, t, kept in zip(hidden, target.tolist(), (of or list(range(40)) for of in sets), strict=True):
            log_p = (weight[kept] @ h / 0.7).log_softmax(-1)
            rows.append((log_p[kept.index(t)], -(log_p.exp() * log_p).sum()))
        return tuple(torch.stack(column) for column in zip(*rows, strict=True))

    cut = head._Cut(Kept.from_lists(sets).to(DEVICE), (2, 40), 40)
    rows = results(lambda h, w: head._RowTiledHead.apply(h, w, w.detach(), target, None, 0.7, None, cut))
    # The sum of the weight's gradients over tiles is in fp32.
    torch.testing.assert_close(rows, results(of_the_kept_words), rtol=0, atol=1e-6)


def test_the_head_of_whole_rows_takes_kept_sets_of_no_token():
    hidden = torch.zeros(0, 4, device=DEVICE, requires_grad=True)
    weight = torch.ones(40, 4, device=DEVICE, requires_grad=True)
    target, kept = torch.zeros(0, dtype=torch.long, device=DEVICE), Kept.from_lists([]).to(DEVICE)
    cut = head._Cut(kept, (head._rows_of_a_tile(weight), 40), 40)
    log_prob, entropy = head._RowTiledHead.apply(hidden, weight, weight.detach(), target, None, 1.0, None, cut)
    assert log_prob.shape == entropy.shape == (0,)
    (log_prob.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 4) and not weight.grad.any()


def test_a_tile_may_be_rows_of_a_wider_buffer_and_a_gradient_one_number_that_autograd_expanded():
    wide, target, _ = tile(3, 64)
    logits, untouched = wide[:, :40], wide[:, 40:].clone()
    target = target.clamp(max=39)
    one = torch.ones((), dtype=torch.float64, device=DEVICE).expand(3)
    expected = plain_gradient(logits, target, (one, one), 1.0, None)
    _, _, *of_row = tile_statistics(logits, target)
    tile_gradient_(logits, target, *of_row, one, one)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    assert torch.equal(wide[:, 40:], untouched)


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [90, 80])
def test_the_compiler_takes_what_the_interpreter_takes(capability, tmp_path):
    """Down to machine code for A100 and H100, which needs neither; in a process where Triton does not interpret."""
    script = """if True:
        import sys
        import triton
        from triton.backends.compiler import GPUTarget
        from grpo_rl.policies.head_triton import BLOCK, LOWEST, _gradient, _statistics

        for kernel in (_statistics, _gradient):
            for logits, softcap in (("*bf16", None), ("*fp32", 30.0)):
                constants = {"TEMPERATURE": 0.7, "SOFTCAP": softcap, "LOWEST": LOWEST, "BLOCK": BLOCK}
                constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
                types = {"logits": logits, "target_ids": "*i64", "STRIDE": "i32", "V": "i32"}
                types |= dict.fromkeys(constants, "constexpr")
                signature = {name: types.get(name, "*fp32") for name in kernel.arg_names}
                source = triton.compiler.ASTSource(kernel, signature, constants)
                binary = triton.compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
                assert len(binary.asm["cubin"]) > 1000
    """
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path)  # compiled anew, not found in a cache
    subprocess.run([sys.executable, "-c", script, str(capability)], check=True, env=env)
