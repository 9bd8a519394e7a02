"""What ranks do in the tests of the vocabulary that is cut over them.

T tokens, D model width, V tokens of the vocabulary, W of them on this rank.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from moetune.comm.gloo import communicator_of
from moetune.comm.group import Communicator
from moetune.runtime.parallel.vocabulary import (
    VocabParallelEmbedding,
    VocabParallelHead,
    vocab_range,
)
from moetune.runtime.parallel.vocabulary import (
    vocab_parallel_cross_entropy as cross_entropy_of,
)
from tests.runtime.workers import relative_error

SAME = 1e-12
NUM_TOKENS, WIDTH = 11, 6
VOCABULARIES = 4, 7, 8, 33
FLOAT32_ROUNDING, BFLOAT16_ROUNDING = 2**-22, 2**-8
OVERFLOWS = 1e3
"""Logits of that size overflow in an exponential without their maximum taken off."""


def equal_whole() -> None:
    """Embedding, head and loss against torch's own, and what they do with wrong tokens."""
    for vocab_size in VOCABULARIES:
        shares_are_the_vocabulary(vocab_size)
        layers_are_drawn_as_whole_ones(vocab_size)
        embedding_equals_whole(vocab_size)
        head_equals_whole(vocab_size)
        for scale in (1.0, OVERFLOWS):
            loss_equals_whole(vocab_size, scale)
    loss_of_bfloat16_is_normalised_in_float32()
    tokens_outside_the_vocabulary_are_refused()


def the_communicator() -> Communicator:
    return communicator_of(None)


def mine_of(vocab_size: int) -> slice:
    share = vocab_range(vocab_size, the_communicator())
    return slice(share.start, share.stop)


def tokens_of(vocab_size: int) -> torch.Tensor:
    """Return (T,) tokens with the first and the last of every rank's share, as far as they go."""
    tokens_T = torch.randint(vocab_size, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))
    tokens_T[:2] = torch.tensor([0, vocab_size - 1])
    return tokens_T


def random(*size: int, seed: int = 2, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def is_equal_on_all_ranks(values: torch.Tensor) -> bool:
    """Bit for bit."""
    rows = the_communicator().all_gather_values(values.detach().flatten(), "a comparison")
    return all(torch.equal(row, rows[0]) for row in rows)


def shares_are_the_vocabulary(vocab_size: int) -> None:
    mine = vocab_range(vocab_size, the_communicator())
    bounds = the_communicator().all_gather_values(
        torch.tensor([mine.start, mine.stop]), "a comparison"
    )
    assert [word for low, high in bounds.tolist() for word in range(low, high)] == list(
        range(vocab_size)
    )
    sizes = bounds[:, 1] - bounds[:, 0]
    assert int(sizes.max() - sizes.min()) <= 1


def layers_are_drawn_as_whole_ones(vocab_size: int) -> None:
    mine = mine_of(vocab_size)
    pairs: tuple[tuple[nn.Module, nn.Module], ...] = (
        (
            VocabParallelEmbedding(vocab_size, WIDTH, the_communicator()),
            nn.Embedding(vocab_size, WIDTH),
        ),
        (VocabParallelHead(WIDTH, vocab_size, the_communicator()), nn.Linear(WIDTH, vocab_size)),
    )
    for shared, whole in pairs:
        for layer in (shared, whole):
            torch.manual_seed(3)
            layer.reset_parameters()  # type: ignore[operator]  # both have it
        wanted = {name: each[mine] for name, each in whole.state_dict().items()}
        found = shared.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def embedding_equals_whole(vocab_size: int) -> None:
    whole = nn.Embedding(vocab_size, WIDTH, dtype=torch.float64)
    shared = VocabParallelEmbedding(vocab_size, WIDTH, the_communicator()).double()
    mine = mine_of(vocab_size)
    with torch.no_grad():
        whole.weight.copy_(random(vocab_size, WIDTH))
        shared.weight.copy_(whole.weight[mine])
    tokens_BS, grad_BSD = tokens_of(vocab_size).view(1, -1), random(1, NUM_TOKENS, WIDTH, seed=4)
    found, wanted = shared(tokens_BS), whole(tokens_BS)
    assert torch.equal(found, wanted)  # a row and zeros: nothing to round
    for result in (found, wanted):
        result.backward(grad_BSD)
    assert shared.weight.grad is not None
    assert whole.weight.grad is not None
    assert relative_error(shared.weight.grad, whole.weight.grad[mine]) <= SAME


def head_equals_whole(vocab_size: int) -> None:
    whole = nn.Linear(WIDTH, vocab_size, dtype=torch.float64)
    shared = VocabParallelHead(WIDTH, vocab_size, the_communicator()).double()
    mine = mine_of(vocab_size)
    with torch.no_grad():
        shared.weight.copy_(whole.weight.copy_(random(vocab_size, WIDTH))[mine])
        shared.bias.copy_(whole.bias.copy_(random(vocab_size, seed=5))[mine])
    x_TD, other_TD = (random(NUM_TOKENS, WIDTH, seed=6).requires_grad_() for _ in "ab")
    grad_TV = random(NUM_TOKENS, vocab_size, seed=7)
    found, wanted = shared(x_TD), whole(other_TD)
    assert relative_error(found, wanted[:, mine]) <= SAME
    found.backward(grad_TV[:, mine])
    wanted.backward(grad_TV)
    for one, other in (
        (x_TD.grad, other_TD.grad),
        (shared.weight.grad, _part(whole.weight.grad, mine)),
        (shared.bias.grad, _part(whole.bias.grad, mine)),
    ):
        assert one is not None
        assert other is not None
        assert relative_error(one, other) <= SAME
    assert x_TD.grad is not None
    assert is_equal_on_all_ranks(x_TD.grad)


def loss_equals_whole(vocab_size: int, scale: float) -> None:
    wanted_T, mine = tokens_of(vocab_size), mine_of(vocab_size)
    logits_TV = (scale * random(NUM_TOKENS, vocab_size)).requires_grad_()
    logits_TW = logits_TV.detach()[:, mine].clone().requires_grad_()
    wanted = functional.cross_entropy(logits_TV, wanted_T)
    found = cross_entropy_of(
        logits_TW, wanted_T, vocab_size=vocab_size, communicator=the_communicator()
    )
    assert abs(found.item() - wanted.item()) <= SAME * max(1.0, abs(wanted.item()))
    assert is_equal_on_all_ranks(found)
    for result in (found, wanted):
        (3 * result).backward()
    assert logits_TW.grad is not None
    assert logits_TV.grad is not None
    torch.testing.assert_close(logits_TW.grad, logits_TV.grad[:, mine], rtol=0, atol=SAME)


def loss_of_bfloat16_is_normalised_in_float32() -> None:
    num_tokens, vocab_size = 64, 1000
    mine = mine_of(vocab_size)
    logits_TV = 8 * random(num_tokens, vocab_size, dtype=torch.bfloat16)
    wanted_T = torch.arange(num_tokens) * 13 % vocab_size
    logits_TW = logits_TV[:, mine].clone().requires_grad_()
    found = cross_entropy_of(
        logits_TW, wanted_T, vocab_size=vocab_size, communicator=the_communicator()
    )
    exact_TV = logits_TV.double().requires_grad_()
    wanted = functional.cross_entropy(exact_TV, wanted_T)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(wanted.item(), rel=FLOAT32_ROUNDING)
    for result in (found, wanted):
        result.backward()
    assert logits_TW.grad is not None
    assert exact_TV.grad is not None
    assert logits_TW.grad.dtype == torch.bfloat16
    torch.testing.assert_close(
        logits_TW.grad.double(), exact_TV.grad[:, mine], rtol=BFLOAT16_ROUNDING, atol=1e-9
    )


def tokens_outside_the_vocabulary_are_refused() -> None:
    vocab_size = 7
    embedding = VocabParallelEmbedding(vocab_size, WIDTH, the_communicator())
    logits_TW = torch.zeros(1, len(vocab_range(vocab_size, the_communicator())))
    for token in (vocab_size, vocab_size + 5, -1, -100):
        tokens_T = torch.tensor([token])
        with pytest.raises(IndexError):
            embedding(tokens_T)
        with pytest.raises(RuntimeError, match="out of bounds"):
            cross_entropy_of(
                logits_TW, tokens_T, vocab_size=vocab_size, communicator=the_communicator()
            )


def _part(whole: torch.Tensor | None, mine: slice) -> torch.Tensor | None:
    return None if whole is None else whole[mine]
