"""Whether an image has the same bits whatever is around it: others in the call, a graph, room that is not used."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.encoders.encoder import Encoder, OpenGraphs
from bench.plan import Plan, Sizes, pixels
from bench.records import Bits
from ernie_vit.model.metadata import tokens_per_item

AGAIN, IN_A_GRAPH, PACKED, PADDED = "again", "in a graph", "packed", "padded"


def compare_bits(
    eager: Encoder, graphs: Sequence[Encoder], padded: dict[str, OpenGraphs], plan: Plan
) -> Iterator[Bits]:
    """Count the images whose tokens have the bits of ``eager`` alone, by each way of its library.

    Args:
        eager: alone and again, and packed.
        graphs: alone and packed, replayed.
        padded: opens a graph of ``plan.capacity`` for each provider, in which the images are alone.
    """
    rows = [pixels([size], device=plan.device, dtype=plan.dtype) for size in plan.images]
    others = [pixels([size], device=plan.device, dtype=plan.dtype) for size in plan.neighbours]
    expected = [alone(eager, mine, size) for mine, size in zip(rows, plan.images, strict=True)]

    def count(encoder: Encoder, situation: str) -> Bits:
        equal = 0
        for mine, size, tokens in zip(rows, plan.images, expected, strict=True):
            found = packed(encoder, mine, size, others, plan) if situation == PACKED else alone(encoder, mine, size)
            equal += torch.equal(found, tokens)
        return Bits(encoder.provider, situation, equal, len(rows))

    yield count(eager, AGAIN)
    yield count(eager, PACKED)
    for encoder in graphs:
        yield count(encoder, IN_A_GRAPH)
        yield count(encoder, PACKED)
    for open_graphs in padded.values():
        with open_graphs([plan.capacity]) as encoder:
            yield count(encoder, PADDED)


def alone(encoder: Encoder, rows: Tensor, size: Sequence[int]) -> Tensor:
    return encoder(rows, torch.tensor([list(size)])).clone()


def packed(encoder: Encoder, rows: Tensor, size: Sequence[int], others: Sequence[Tensor], plan: Plan) -> Tensor:
    """The image's tokens out of a call with one image before it and one after it."""
    before, after = plan.neighbours
    sizes: Sizes = [before, size, after]
    tokens = encoder(torch.cat([others[0], rows, others[1]]), torch.tensor([list(each) for each in sizes]))
    return tokens.split(tokens_per_item(tuple(map(tuple, sizes))))[1].clone()  # type: ignore[arg-type]
