"""Embeddings, layers and outputs of models in usual structures, whatever their names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from torchscout.adapters.pytorch import PyTorchAdapter
from torchscout.adapters.structure import Part, layers_of, plain_name, structure_of, surface_of

WIDTH, TOKENS = 16, 40


class Bag(nn.Module):
    """Any modules under any names, and a forward that is never called here."""

    def __init__(self, **members: nn.Module) -> None:
        super().__init__()
        for name, member in members.items():
            self.add_module(name, member)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        raise AssertionError("structure is read, not run")


class Block(Bag):
    """A transformer layer whose larger half is a Sequential of matrices."""

    def __init__(self, width: int = WIDTH, **more: nn.Module) -> None:
        mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        super().__init__(norm=nn.LayerNorm(width), mix=nn.Linear(width, width), mlp=mlp, **more)


class Attention(Bag):
    def __init__(self) -> None:
        super().__init__(query=nn.Linear(WIDTH, WIDTH), value=nn.Linear(WIDTH, WIDTH))


class Scan(nn.Module):
    """A layer without submodules, as fused kernels have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH))
        self.state = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Stage(Bag):
    def __init__(self, width: int, **more: nn.Module) -> None:
        super().__init__(blocks=nn.ModuleList(Block(width) for _ in range(2)), **more)


class Expert(Bag):
    def __init__(self) -> None:
        super().__init__(up=nn.Linear(WIDTH, 8 * WIDTH), down=nn.Linear(8 * WIDTH, WIDTH))


class PartitionedEmbedding(nn.Module):
    """This rank's rows of a table, laid out as Megatron does."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.num_embeddings, self.num_embeddings_per_partition = 2 * rows, rows
        self.weight = nn.Parameter(torch.ones(rows, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[x]


def blocks(count: int = 3) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def tokens() -> nn.Embedding:
    return nn.Embedding(TOKENS, WIDTH)


def head(rows: int = TOKENS) -> nn.Linear:
    return nn.Linear(WIDTH, rows, bias=False)


def names(model: nn.Module, **arguments: str | list[str]) -> tuple[list[str], list[str], list[str]]:
    found = structure_of(model, **arguments)
    for part in (*found.embeddings, *found.layers, *found.outputs):
        assert isinstance(part, Part)
    return tuple([part.name for part in each] for each in (found.embeddings, found.layers, found.outputs))


def gpt(**more: nn.Module) -> Bag:
    body = Bag(wte=tokens(), wpe=nn.Embedding(24, WIDTH), h=blocks(), ln=nn.LayerNorm(WIDTH))
    return Bag(transformer=body, lm_head=head(), **more)


GPT = (
    ["transformer.wte", "transformer.wpe"],
    ["transformer.h.0", "transformer.h.1", "transformer.h.2"],
    ["lm_head"],
)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_with_an_untied_head():
    assert names(gpt()) == GPT


def test_an_untied_head_is_known_by_its_rows_among_others_and_wherever_it_is_registered():
    model = Bag(projector=head(), value=head(1), a=tokens(), deep=blocks(), pooler=head(WIDTH))
    assert names(model) == (["a"], ["deep.0", "deep.1", "deep.2"], ["projector"])


def test_a_tied_head_wins_over_one_of_the_same_size():
    model = Bag(zwölf=tokens(), tower=blocks(2), spare=head(), out=head())
    model.out.weight = model.zwölf.weight
    assert names(model) == (["zwölf"], ["tower.0", "tower.1"], ["out"])


def test_a_head_over_a_partitioned_vocabulary():
    model = Bag(words=PartitionedEmbedding(10), decoder=Bag(stack=blocks(2)), side=head(20), logits=head(10))
    assert names(model) == (["words"], ["decoder.stack.0", "decoder.stack.1"], ["logits"])


def test_layers_in_a_dictionary():
    layers = nn.ModuleDict({"0": Block(), "1": Block(), "seven": Block()})
    model = Bag(tok=tokens(), layers=layers, norm=nn.RMSNorm(WIDTH), output=head())
    assert names(model) == (["tok"], ["layers.0", "layers.1", "layers.seven"], ["output"])


def test_an_encoder_and_a_decoder():
    model = Bag(
        shared=tokens(),
        encoder=Bag(block=blocks(2)),
        decoder=Bag(block=nn.ModuleList(Attention() for _ in range(2))),
        project=head(),
    )
    layers = ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]
    assert names(model) == (["shared"], layers, ["project"])


def test_a_small_decoder_of_blocks_counts_too():
    model = Bag(encoder=nn.ModuleList(Block(64) for _ in range(4)), decoder=blocks(2))
    assert names(model)[1][-2:] == ["decoder.0", "decoder.1"]


@pytest.mark.parametrize(
    "stack",
    [[Scan, Scan, Scan, Attention, Scan], [Attention, Scan, Attention, Scan], [Scan, Scan, Attention]],
)
def test_a_stack_of_several_kinds_of_layers(stack: list[type[nn.Module]]):
    model = Bag(tok=tokens(), backbone=nn.ModuleList(kind() for kind in stack), out=head())
    assert names(model) == (["tok"], [f"backbone.{i}" for i in range(len(stack))], ["out"])


def test_lists_within_a_list_are_taken_apart_because_nobody_calls_them():
    pairs = nn.ModuleList(nn.ModuleList([Attention(), Block()]) for _ in range(2))
    assert names(Bag(layers=pairs))[1] == ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


def test_stages_of_blocks_are_taken_apart():
    stages = nn.ModuleList([Stage(16, shrink=nn.Linear(64, 32)), Stage(32)])
    model = Bag(patches=nn.Conv2d(3, WIDTH, 4), stages=stages, out=head(10))
    layers = [f"stages.{stage}.blocks.{block}" for stage in range(2) for block in range(2)]
    assert names(model) == ([], layers, ["out"])


def test_stages_that_are_sequentials_or_attributes():
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(32), Block(32)))
    layers = ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    assert names(Bag(stages=stages))[1] == layers
    assert names(Bag(one=stages[0], two=stages[1]))[1] == ["one.0", "one.1", "two.0", "two.1"]


def test_a_stage_that_is_checkpointed_as_a_whole_is_one_layer():
    stages = nn.ModuleList(checkpoint_wrapper(nn.Sequential(Block(), Block())) for _ in range(2))
    found = layers_of(Bag(stages=stages))
    assert [layer.name for layer in found] == ["stages.0", "stages.1"]
    assert all(isinstance(layer.module, CheckpointWrapper) for layer in found)


def test_a_sequential_that_is_the_whole_model():
    model = nn.Sequential(tokens(), Block(), Block(), Block(), nn.LayerNorm(WIDTH), head())
    assert names(model) == (["0"], ["1", "2", "3"], ["5"])


def test_a_sequential_whose_ends_are_modules_of_several_parts():
    start = Bag(words=tokens(), places=nn.Embedding(24, WIDTH))
    model = nn.Sequential(start, Attention(), Attention(), Block(), Expert())
    assert names(model) == (["0.words", "0.places"], ["1", "2", "3", "4"], [])
    model.append(nn.Sequential(nn.LayerNorm(WIDTH), head()))
    assert names(model) == (["0.words", "0.places"], ["1", "2", "3", "4"], ["5.1"])


def test_a_plain_stack_of_matrices():
    model = nn.Sequential(*(module for _ in range(3) for module in (nn.Linear(8, 8), nn.ReLU())))
    assert names(model) == ([], ["0", "2", "4"], [])


@pytest.mark.parametrize(("local", "routed", "width"), [(4, 4, 8), (4, 8, 32), (2, 8, 32), (1, 8, 16)])
def test_experts_inside_a_layer_are_no_layers(local: int, routed: int, width: int):
    def layer() -> Bag:
        experts = nn.ModuleList(Expert() for _ in range(local))
        return Bag(attention=nn.Linear(width, width), router=nn.Linear(width, routed), experts=experts)

    model = Bag(tok=tokens(), layers=nn.ModuleList(layer() for _ in range(3)), out=head())
    assert names(model) == (["tok"], ["layers.0", "layers.1", "layers.2"], ["out"])
    deep = nn.ModuleList(Bag(mix=nn.Linear(WIDTH, WIDTH), moe=layer()) for _ in range(2))
    assert names(Bag(tok=tokens(), layers=deep))[1] == ["layers.0", "layers.1"]


def test_a_list_of_one_layer_is_a_pipeline_stage():
    assert names(Bag(layers=blocks(1), out=head())) == ([], ["layers.0"], ["out"])
    wrapped = nn.ModuleList([gpt()])
    assert names(Bag(chunks=wrapped)) == tuple([f"chunks.0.{name}" for name in each] for each in GPT)


class Chunk(Bag):
    """A pipeline stage: what other stages have is None in it, and blocks keep their numbers."""

    def __init__(self, *numbers: int, first: bool = False, last: bool = False) -> None:
        super().__init__(layers=nn.ModuleDict({str(number): Block() for number in numbers}))
        self.tok_embeddings = nn.Embedding(100 * TOKENS, WIDTH) if first else None
        self.norm = nn.LayerNorm(WIDTH) if last else None
        self.output = head(100 * TOKENS) if last else None


def test_one_pipeline_stage_may_lack_either_end():
    assert names(Chunk(0, 1, first=True)) == (["tok_embeddings"], ["layers.0", "layers.1"], [])
    assert names(Chunk(2, 3)) == ([], ["layers.2", "layers.3"], [])
    assert names(Chunk(4, last=True)) == ([], ["layers.4"], ["output"])


def test_several_pipeline_stages_of_one_rank():
    first = nn.ModuleList([Chunk(0, 1, first=True), Chunk(4)])
    assert names(first) == (["0.tok_embeddings"], ["0.layers.0", "0.layers.1", "1.layers.4"], [])
    second = nn.ModuleList([Chunk(2), Chunk(2, last=True)])
    assert names(second) == ([], ["0.layers.2", "1.layers.2"], ["1.output"])
    bent = nn.ModuleList([Chunk(0, first=True), Chunk(3, last=True)])
    assert names(bent) == (["0.tok_embeddings"], ["0.layers.0", "1.layers.3"], ["1.output"])
    named = nn.ModuleDict({"later": Chunk(3, last=True), "earlier": Chunk(1)})
    assert names(named) == ([], ["later.layers.3", "earlier.layers.1"], ["later.output"])


def test_a_pipeline_stage_without_layers_is_one_as_a_whole():
    ends = nn.ModuleList([Chunk(first=True), Chunk(1), Chunk(last=True)])
    assert names(ends) == (["0.tok_embeddings"], ["0", "1.layers.1", "2"], ["2.output"])
    assert names(nn.ModuleList([Chunk(last=True)])) == ([], ["0"], [])


def test_pipeline_stages_that_are_single_blocks_or_sequentials():
    assert names(nn.ModuleList([Block(), Block()]))[1] == ["0", "1"]
    sequentials = nn.ModuleList([nn.Sequential(tokens(), Block(), Block()), nn.Sequential(Block(), head())])
    assert names(sequentials) == (["0.0"], ["0.1", "0.2", "1"], ["1.1"])
    matrices = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(2))
    assert names(matrices)[1] == ["0", "1"]


def test_wrapped_pipeline_stages(one_rank: None):
    stages = [DistributedDataParallel(Chunk(0)), torch.compile(Chunk(1)), Chunk(2, last=True)]
    fully_shard(stages[2].layers["2"])
    fully_shard(stages[2])
    found = structure_of(nn.ModuleList(stages))
    assert [each.name for each in found.layers] == ["0.module.layers.0", "1.layers.1", "2.layers.2"]
    assert [each.name for each in found.outputs] == ["2.output"]
    (bare,) = layers_of(nn.ModuleList([DistributedDataParallel(nn.Linear(4, 4))]))
    assert (bare.name, type(bare.module)) == ("0.module", nn.Linear)


def test_configured_names_of_pipeline_stages():
    model = nn.ModuleList([Chunk(0, first=True), Chunk(2, last=True)])
    assert names(model, layers="1.layers")[1] == ["1.layers.2"]
    assert names(model, layers=["0", "1.layers.2"]) == (
        ["0.tok_embeddings"],
        ["0", "1.layers.2"],
        ["1.output"],
    )


@pytest.mark.parametrize("rows", [TOKENS, 4 * TOKENS])
def test_a_list_of_heads_is_outputs_and_a_list_of_tables_embeddings_whatever_their_size(rows: int):
    tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for _ in range(2))
    model = Bag(codes=tables, layers=blocks(2), heads=nn.ModuleList(head(rows) for _ in range(2)))
    assert names(model) == (["codes.0", "codes.1"], ["layers.0", "layers.1"], ["heads.0", "heads.1"])


def test_small_heads_beside_a_plain_stack():
    heads = nn.ModuleList(head(1) for _ in range(2))
    stack = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    model = Bag(words=nn.Embedding(1, 2), stack=stack, heads=heads)
    assert names(model) == (["words"], ["stack.0", "stack.1", "stack.2"], ["heads.0", "heads.1"])
    large = nn.ModuleList(head(WIDTH) for _ in range(2))
    assert names(Bag(stack=stack, more=large))[1][-2:] == ["more.0", "more.1"]
    assert names(Bag(front=heads, stack=stack))[1][:2] == ["front.0", "front.1"]


def test_a_functional_head_is_no_module():
    assert names(Bag(tok=tokens(), layers=blocks(), norm=nn.LayerNorm(WIDTH)))[2] == []


def test_the_only_matrix_after_the_layers_is_the_output():
    assert names(Bag(stem=head(WIDTH), layers=blocks(1), score=head(3))) == ([], ["layers.0"], ["score"])


def test_two_possible_outputs_are_a_mistake_only_for_whoever_needs_the_output():
    model = Bag(tok=tokens(), layers=blocks(2), head_a=head(2), head_b=head(3))
    with pytest.raises(ValueError, match=r"which of head_a, head_b .* pass ReplayConfig\(output='head_b'\)"):
        structure_of(model)
    adapter = PyTorchAdapter(model, [], None)
    assert adapter.layers() == [*model.layers]
    with pytest.raises(ValueError, match="which of head_a, head_b"):
        adapter.structure()
    assert adapter.structure(output="head_a").outputs == (Part("head_a", model.head_a),)


def test_where_nothing_repeats_the_model_is_the_layer():
    model = Bag(tok=tokens(), inner=nn.Linear(WIDTH, WIDTH), more=nn.Linear(WIDTH, WIDTH), out=head())
    assert names(model) == (["tok"], ["model"], ["out"])
    assert layers_of(model) == (Part("model", model),)
    assert names(nn.Linear(4, 4)) == ([], ["model"], [])


@pytest.mark.parametrize(
    "list_",
    [
        nn.ModuleList([Attention(), Expert()]),
        nn.ModuleList([nn.Linear(4, 4)]),
        nn.Sequential(nn.LayerNorm(WIDTH), Attention()),
        nn.ModuleList([tokens(), tokens()]),
        nn.ModuleList([nn.ReLU(), nn.ReLU()]),
    ],
)
def test_a_list_without_repeated_layers_is_none(list_: nn.Module):
    assert names(Bag(some=list_, last=nn.Linear(WIDTH, 3)))[1] == ["model"]


def test_a_table_inside_a_repeated_layer_belongs_to_it():
    layers = nn.ModuleList([Block(distance=nn.Embedding(64, 2)), Block(), Block()])
    model = Bag(tok=tokens(), layers=layers, out=head(64))
    assert names(model) == (["tok"], ["layers.0", "layers.1", "layers.2"], ["out"])


def test_parameters_that_deepspeed_has_emptied():
    model = gpt(tail=head(3))
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
        parameter.data = torch.empty(0)
    assert names(model) == GPT


def test_a_shared_layer_appears_once():
    layer, other = Block(), Block()
    assert names(Bag(layers=nn.ModuleList([layer, other, layer])))[1] == ["layers.0", "layers.1"]
    assert names(Bag(layers=nn.ModuleList([layer] * 3)))[1] == ["layers.0"]
    assert names(Bag(layers=nn.Sequential(layer, layer)))[1] == ["layers.0"]
    twice = nn.ModuleList([checkpoint_wrapper(layer), checkpoint_wrapper(layer)])
    assert names(Bag(layers=twice))[1] == ["layers.0"]


def test_names_do_not_contain_data_parallel_wrappers(one_rank: None):
    assert names(DistributedDataParallel(gpt())) == GPT
    assert names(torch.compile(DistributedDataParallel(gpt()))) == GPT
    assert names(DistributedDataParallel(torch.compile(gpt()))) == GPT
    single = nn.Linear(4, 4)
    assert layers_of(DistributedDataParallel(single)) == (Part("model", single),)


def test_sharded_layers_are_of_the_kind_they_were(one_rank: None):
    model = gpt()
    for layer in [*model.transformer.h][:2]:
        fully_shard(layer)
    fully_shard(model)
    assert names(model) == GPT
    alternating = nn.ModuleList([Block(), Block()])
    fully_shard(alternating[0])
    assert names(Bag(layers=alternating))[1] == ["layers.0", "layers.1"]


@pytest.mark.parametrize(
    "wrap", [checkpoint_wrapper, torch.compile, lambda module: torch.compile(checkpoint_wrapper(module))]
)
def test_a_part_is_its_outermost_wrapper_under_its_plain_name(wrap):
    model = gpt()
    layers = [wrap(layer) for layer in model.transformer.h]
    model.transformer.h = nn.ModuleList(layers)
    model.lm_head, model.transformer.wte = wrap(model.lm_head), wrap(model.transformer.wte)
    found = structure_of(model)
    assert names(model) == GPT
    assert [layer.module for layer in found.layers] == layers
    assert found.outputs[0].module is model.lm_head
    assert found.embeddings[0].module is model.transformer.wte
    (inner,) = (f"transformer.h.1.{name}" for name, _ in layers[1].named_children())
    assert layers_of(model, [inner]) == (Part("transformer.h.1", layers[1]),)


def test_only_some_layers_wrapped_are_still_of_one_kind():
    layers = nn.ModuleList([checkpoint_wrapper(Block()), Block()])
    assert names(Bag(layers=layers))[1] == ["layers.0", "layers.1"]


def test_configured_names_take_precedence_over_the_search():
    model = Bag(a=tokens(), b=tokens(), one=blocks(2), two=blocks(2), x=head(), y=head())
    assert names(model, embedding="b", layers="two", output="x") == (["b"], ["two.0", "two.1"], ["x"])
    assert names(model, layers=["two.1", "module.one.0"])[1] == ["two.1", "one.0"]
    assert names(model, layers=["one", "two"])[1] == ["one.0", "one.1", "two.0", "two.1"]
    assert names(model, layers="one.1.mlp")[1] == ["one.1.mlp.0", "one.1.mlp.2"]
    assert names(model, layers=["one.1.mlp"])[1] == ["one.1.mlp"]
    assert names(model, layers="one.1")[1] == ["one.1"]
    assert names(model, layers="model")[1] == ["model"]


def test_what_stands_outside_of_the_users_layers_is_still_searched():
    model = Bag(tok=tokens(), stack=Bag(first=Block(), second=Block()), score=head(3))
    found = names(model, layers=["stack.first", "stack.second"])
    assert found == (["tok"], ["stack.first", "stack.second"], ["score"])


@pytest.mark.parametrize("what", ["embedding", "layers", "output"])
def test_an_unknown_path_is_refused_with_the_nearest_match(what: str):
    with pytest.raises(ValueError, match=f"{what}='transformer.ha' is not a module .*'transformer.h'"):
        structure_of(gpt(), **{what: "transformer.ha"})


def test_layers_without_parameters_are_refused():
    with pytest.raises(ValueError, match=r"layers='acts' contains no module with parameters"):
        structure_of(gpt(acts=nn.ModuleList([nn.ReLU(), nn.ReLU()])), layers="acts")
    with pytest.raises(ValueError, match=r"layers=\[\] contains no module"):
        structure_of(gpt(), layers=[])


@pytest.mark.parametrize(
    ("dotted", "plain", "surface"),
    [
        ("layer.2.up.weight", "layer.2.up.weight", "layer.2.up/weight"),
        ("module.layer.2.up.weight", "layer.2.up.weight", "layer.2.up/weight"),
        ("module.module.h.0.weight", "h.0.weight", "h.0/weight"),
        ("_orig_mod.module.h.0.weight", "h.0.weight", "h.0/weight"),
        ("h.0._checkpoint_wrapped_module.mlp._orig_mod.weight", "h.0.mlp.weight", "h.0.mlp/weight"),
        ("_fsdp_wrapped_module.h.1._fsdp_wrapped_module.bias", "h.1.bias", "h.1/bias"),
        ("h.module.bias", "h.module.bias", "h.module/bias"),
        ("module.weight", "weight", "model/weight"),
    ],
)
def test_names_without_wrappers(dotted: str, plain: str, surface: str):
    assert plain_name(dotted) == plain
    assert surface_of(dotted) == surface
