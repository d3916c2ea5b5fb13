"""Layers with different heads share a page: each part is attended as if it were alone."""

import torch

from engine.attention.choose import choose_for_layers
from engine.attention.layered import LayeredAttention
from engine.attention.shape import AttentionShape
from engine.attention.torch_sdpa import TorchSdpaAttention
from tests.support.attention import Problem

SMALL, WIDE = AttentionShape(4, 2, 64, 0.125), AttentionShape(4, 1, 128, 0.1)


def test_each_part_is_attended_as_if_alone() -> None:
    lens = [(3, 40), (1, 17), (20, 20)]
    alone = [Problem(lens, (4, 2), 64), Problem(lens, (4, 1), 128)]
    shapes = [WIDE, SMALL, WIDE, SMALL]  # layers 2 and 3 are the second of their parts, as Problem's layer 1
    problems = [alone[1], alone[0]]  # in the order of first layers
    for problem, shape in zip(problems, (WIDE, SMALL), strict=True):
        problem.shape = shape
    num_pages = len(problems[0].pool)
    pool = torch.cat([problem.pool.reshape(num_pages, -1) for problem in problems], 1)
    attention = choose_for_layers(shapes, [None, 8, None, 8], 16, torch.device("cpu"), torch.float32).backend
    assert isinstance(attention, LayeredAttention)
    attention.plan(pool, problems[0].batch)
    for layer, problem, window in ((2, problems[0], None), (3, problems[1], 8)):
        found = attention.attend(layer, problem.heads, window)
        expected, pages = problem.run(TorchSdpaAttention(problem.shape), window)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        part = attention._views[problems.index(problem)]
        assert torch.equal(part, pages)
