"""The picture of the tokens: components, colours, and which token lies where."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("matplotlib")
Image = pytest.importorskip("PIL.Image")

from ernie_vit.encoding import Encoded  # noqa: E402  after the packages that it needs
from ernie_vit.inputs import Source  # noqa: E402
from ernie_vit.picture import draw_picture, panels_of, principal_components, token_colors  # noqa: E402


@pytest.mark.parametrize("shape", [(40, 12), (12, 40)], ids=["more-rows", "more-columns"])
def test_components_are_those_of_the_singular_value_decomposition(shape: tuple[int, int]) -> None:
    rows = torch.randn(*shape) * torch.linspace(1, 5, shape[1])
    components = principal_components(rows, 3)
    centred = rows.double() - rows.double().mean(0)
    u, s, _ = torch.linalg.svd(centred, full_matrices=False)
    torch.testing.assert_close(components.abs(), (u * s)[:, :3].abs())
    extremes = components.gather(0, components.abs().argmax(0, keepdim=True))
    assert (extremes > 0).all()


def test_colours_do_not_depend_on_the_solver_s_signs() -> None:
    rows = torch.randn(20, 8)
    mirrored = rows @ torch.linalg.qr(torch.randn(8, 8)).Q  # the same picture in another basis
    torch.testing.assert_close(token_colors(rows, (1, 8, 10)), token_colors(mirrored, (1, 8, 10)), rtol=1e-3, atol=1e-3)


def test_tokens_lie_row_by_row() -> None:
    y, x = torch.meshgrid(torch.arange(4.0), torch.arange(7.0), indexing="ij")
    tokens = torch.stack([x.flatten(), y.flatten() / 10], dim=1)  # the first component is x, the second y
    colors = token_colors(tokens, (1, 8, 14))
    assert colors.shape == (1, 4, 7, 3)
    red = colors[0, :, :, 0]
    assert torch.equal(red, red[:1].expand(4, 7))
    steps = red[0].diff()
    assert (steps > 0).all() or (steps < 0).all()
    assert torch.equal(colors[..., 2], torch.full((1, 4, 7), 0.5)), "there is no third component"


@pytest.mark.parametrize("tokens", [torch.randn(1, 8), torch.ones(6, 8)], ids=["one", "equal"])
def test_tokens_without_spread_are_grey(tokens: torch.Tensor) -> None:
    assert torch.equal(token_colors(tokens, (1, 2, 2 * len(tokens))), torch.full((1, 1, len(tokens), 3), 0.5))


def test_a_video_has_a_panel_for_each_pair_of_frames(tmp_path: Path) -> None:
    frames = tuple(tmp_path / f"{index}.png" for index in range(3))
    for index, frame in enumerate(frames):
        Image.new("RGB", (40, 20), (index, 0, 0)).save(frame)
    video = Encoded(Source(tmp_path, frames), (40, 20), (4, 2, 4), torch.randn(4, 8), 1.0)
    panels = panels_of(video)
    assert [panel.photograph.getpixel((0, 0))[0] for panel in panels] == [0, 2]
    assert [panel.colors.shape for panel in panels] == [(1, 2, 3), (1, 2, 3)]


def test_any_shape_can_be_drawn(tmp_path: Path) -> None:
    results = []
    for index, size in enumerate([(60, 40), (400, 1), (1, 400)]):
        Image.new("RGB", size, (200, 0, 0)).save(tmp_path / f"{index}.png")
        results.append(Encoded(Source(tmp_path / f"{index}.png"), size, (1, 4, 6), torch.randn(6, 8), 1.0))
    draw_picture([panel for result in results for panel in panels_of(result)], tmp_path / "picture.png")
    picture = Image.open(tmp_path / "picture.png").convert("RGB")
    assert max(picture.size) < 4000
    assert picture.getpixel((picture.width // 4, 150)) == (200, 0, 0)
