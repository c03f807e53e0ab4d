"""Networks: shapes, unit-norm embeddings, the published size of PreAct ResNet-18, clear errors."""

import os
import subprocess
import sys

import pytest
import torch

from urrl.errors import UserError
from urrl.nets import Members, build_network
from urrl.nets.lean import Pair

IMAGES = [(3, 32, 32), (1, 28, 28), (1, 8, 8)]


@pytest.mark.parametrize("head", ["linear", "mlp"])
@pytest.mark.parametrize(
    ("name", "shape"),
    [(n, s) for n in ("preact", "fast") for s in IMAGES]
    + [("lean", s) for s in (*IMAGES[:2], (1, 16, 16), (3, 16, 90), (3, 48, 64), (1, 300, 200))]
    + [("mlp", (20,))],
)
def test_outputs(name, shape, head):
    net = build_network(name, shape, n_classes=7, width=4, embed_dim=6, head=head)
    out = net(torch.randn(5, *shape))
    assert out.logits.shape == (5, 7) and out.q.shape == (5, 6) and out.feature.shape[0] == 5
    torch.testing.assert_close(out.q.norm(dim=1), torch.ones(5))
    (out.logits.sum() + out.q[:, 0].sum()).backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in net.parameters())


def test_preact_resnet18_has_its_published_size():
    net = build_network("preact", (3, 32, 32), 10, 64, 50, "linear")
    embedding = sum(p.numel() for p in net.embed.parameters())
    assert sum(p.numel() for p in net.parameters()) - embedding == 11_172_170  # with the batch norm before the pooling


def test_larger_images_do_not_cost_the_lean_net_more():
    def inside(shape):
        seen = []
        net = build_network("lean", shape, 10, 4, 4, "linear")
        stem = net.backbone.get_submodule("stem")
        stem.register_forward_hook(lambda module, inputs, out: seen.append(tuple(out.shape[2:])))
        net(torch.randn(2, *shape))
        return seen[0]

    assert inside((3, 32, 32)) == inside((3, 64, 64)) == inside((3, 128, 128)) == (31, 31)


@pytest.mark.parametrize(
    ("name", "shape", "head", "named"),
    [
        ("other", (3, 32, 32), "linear", "net 'other'"),
        ("mlp", (3, 32, 32), "linear", "mlp"),
        ("fast", (20,), "linear", "feature vectors"),
        ("fast", (1, 28, 28), "deep", "head 'deep'"),
        ("lean", (1, 40, 15), "linear", "at least 16 pixels a side; choose fast"),
        ("lean", (20,), "linear", "feature vectors"),
    ],
)
def test_what_does_not_fit_is_named(name, shape, head, named):
    with pytest.raises(UserError, match=named):
        build_network(name, shape, 10, 8, 8, head)


@pytest.mark.parametrize(("inputs", "outputs"), [(24, 32), (32, 32), (24, 8)])
def test_a_lean_pair_begins_by_handing_on_its_inputs_and_adds(inputs, outputs):
    x = torch.randn(2, inputs, 5, 7)
    pair = Pair(inputs, outputs).eval()
    y = pair.halve[0](x)
    same = min(inputs, outputs)
    torch.testing.assert_close(y[:, :same], x[:, :same])
    assert outputs == same or y[:, same:].std() > 0.1

    half = pair.halve(x)
    assert half.shape == (2, outputs, 2, 3)
    assert not torch.allclose(pair(x), half)
    torch.nn.init.zeros_(pair.get_parameter("add.0.weight"))
    torch.testing.assert_close(pair(x), half)  # nothing to add


@pytest.mark.parametrize(
    ("shape", "width"), [((1, 28, 28), 16), ((3, 32, 32), 24), ((3, 32, 32), 64), ((3, 64, 64), 5)]
)
def test_the_lean_net_begins_with_patches_of_equal_variance(shape, width):
    rng = torch.Generator().manual_seed(0)
    x = torch.nn.functional.avg_pool2d(torch.randn(400, *shape, generator=rng), 3, 1, 1)  # neighbours are alike
    net = build_network("lean", shape, 10, width, 8, "linear")
    net.begin(x)
    stem = net.backbone.get_submodule("stem.0")
    assert isinstance(stem, torch.nn.Conv2d) and stem.bias is not None
    y = stem(x).transpose(0, 1).flatten(1)  # (channels, responses)
    half = (len(y) + 1) // 2
    torch.testing.assert_close(y[: len(y) - half], -y[half:])
    products = y[:half] @ y[:half].T / y.shape[1]
    assert half > 2 and (products - torch.eye(half)).abs().max() < 0.1
    net(x[:4]).logits.sum().backward()
    assert stem.weight.grad is None and stem.bias.grad is not None
    assert len(y) == min(width, 2 * stem.weight[0].numel())

    net.zero_grad()
    net.settle()
    net(x[:4]).logits.sum().backward()
    first = net.backbone.get_parameter("pairs.0.halve.0.weight")
    assert stem.bias.grad is None and first.grad is not None and first.grad.abs().sum() > 0


def test_the_stem_of_very_large_images_learns_from_a_random_start():
    net = build_network("lean", (3, 320, 320), 10, 4, 8, "linear")
    before = net.backbone.get_parameter("stem.0.weight").clone()
    net.begin(torch.randn(2, 3, 320, 320))
    after = net.backbone.get_parameter("stem.0.weight")
    assert torch.equal(before, after) and after.requires_grad
    net.settle()
    assert all(p.requires_grad for p in net.parameters())  # it has not learned enough


def test_a_shortcut_with_few_channels_leaves_memory_alone():
    """A 1x1 convolution with a stride does not, on some CPUs: a heap that is checked at every call would end this."""
    code = "\n".join([
        "import torch",
        "from urrl.nets import build_network",
        "torch.set_num_threads(1)",
        "for name in ('fast', 'preact'):",
        "    net = build_network(name, (1, 8, 8), 10, 2, 4, 'linear').to(memory_format=torch.channels_last)",
        "    for _ in range(100):",
        "        net(torch.randn(40, 1, 8, 8)).logits.sum().backward()",
    ])  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "MALLOC_PERTURB_": "165"})


def test_the_lean_net_is_narrow_where_the_image_is_whole():
    net = build_network("lean", (1, 28, 28), 10, 16, 64, "linear")
    convolutions = [layer.out_channels for layer in net.modules() if isinstance(layer, torch.nn.Conv2d)]
    assert convolutions == [16, 16, 16, 64, 64, 128, 128] and net.backbone.out_features == 128


def test_members_predict_by_their_mean_and_learn_apart():
    torch.manual_seed(0)
    net = build_network("fast", (1, 8, 8), n_classes=7, width=4, embed_dim=6, head="linear", members=3)
    one = build_network("fast", (1, 8, 8), n_classes=7, width=4, embed_dim=6, head="linear")
    x = torch.randn(12, 1, 8, 8)
    assert isinstance(net, Members) and net.embed_dim == 18
    assert len({next(member.parameters()).sum().item() for member in net.networks}) == 3  # each begins by itself
    assert sum(p.numel() for p in net.parameters()) == 3 * sum(p.numel() for p in one.parameters())

    out, alone = net.eval()(x), [member(x) for member in net.networks]
    torch.testing.assert_close(out.logits.softmax(1), sum(o.logits.softmax(1) for o in alone) / 3)
    torch.testing.assert_close(out.q.norm(dim=1), torch.ones(12))
    torch.testing.assert_close(out.q @ out.q.T, sum(o.q @ o.q.T for o in alone) / 3)

    out = net.train()(x)
    for place, (member, rows) in enumerate(zip(net.networks, x.split(4))):
        alone_out = member(rows)
        torch.testing.assert_close(out.logits[4 * place :][:4], alone_out.logits)
        own = torch.zeros(4, 18)
        own[:, 6 * place :][:, :6] = alone_out.q
        torch.testing.assert_close(out.q[4 * place :][:4], own * 3**0.5)
    views = net(torch.cat([x, x]), 2)  # both views of an item go to one member
    for place, (member, rows) in enumerate(zip(net.networks, x.split(4))):
        both = member(torch.cat([rows, rows]))
        for start in (0, 12):
            torch.testing.assert_close(views.logits[start + 4 * place :][:4], both.logits[:4])
    net.zero_grad()
    net(x).logits[:4].sum().backward()
    assert [any(p.grad is not None and p.grad.any() for p in m.parameters()) for m in net.networks] == [
        True,
        False,
        False,
    ]
