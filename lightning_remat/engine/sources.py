"""Where kept content comes from: noted while an :class:`~lightning_remat.engine.eviction.Eviction` looks after a tape.

What is kept has no record otherwise: its op is called and nothing else. To drop it later, its op must be known, and
knowing it must not keep a tensor alive, since plans are held to their peak by the byte. So a kept op is noted as a
*recipe* whose inputs are *sources*: the identity of a content, which knows the recipe that makes it and refers weakly
to whoever holds the content itself::

    Saved (held by autograd), Value (held by recorded ops) ──> Source ──> Recipe ──> Source of an input ...
    Saved, Value                                          <┄┄ Source     (weak)

Content of which no recipe is known (a batch, what a random or in-place op left, what other libraries made) is a source
as well, and can be used for as long as somebody holds it.
"""

from __future__ import annotations

from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from lightning_remat.engine.aliases import alias
from lightning_remat.engine.generators import RecordedState
from lightning_remat.engine.rules import Rule, rule_for
from lightning_remat.engine.store import CONSTANTS, Store, Unrecordable, forgetter
from lightning_remat.engine.values import HELD, Geometry, Op, Value, geometry_of
from lightning_remat.errors import MODIFIED

_STRIDED = torch.strided
_grad_enabled = torch.is_grad_enabled
_NoModes = torch._C._DisableTorchDispatch

# What may be done with an op, by what it is: see verdict_on.
NEVER = 0  # a failed call may have left something behind, so it is not called again
AGAIN = 1  # call it again; what it makes is no recipe's
NOTE = 2  # call it again, and note how its result was made
NOTE_RULE = 3  # the same, with a look at the rule: it may draw, or cross a bus


class Recipe:
    """How an op made what it made; holds no tensor but parameters."""

    __slots__ = ("args", "extra", "func", "index", "op", "position")

    func: Any
    args: list[Any]  # tensors are replaced by (source, geometry)
    extra: tuple[dict[str, Any], Rule | None, None] | None  # as an op's, keywords in terms of sources
    index: int  # order of execution, counted together with ops
    position: int  # of the op in the plan that is followed; -1: there is none
    op: weakref[Op] | None  # the record that was made of it, if it has been dropped


class Source:
    """The identity of one content of one storage."""

    __slots__ = (
        "__weakref__",
        "anchor",
        "geometry",
        "lost",
        "parameter",
        "position",
        "recipe",
        "saved",
        "tensor",
        "value",
        "version",
    )

    recipe: Recipe | None
    position: int  # among the outputs
    geometry: Geometry | None  # in which the op returned it
    value: weakref[Value] | None
    saved: list[weakref[Saved]]
    version: int | None  # version counter of the content; None: inference tensors have none
    parameter: Tensor | None  # the parameter that holds it
    tensor: weakref[Tensor] | None  # where there is no recipe: the program's own tensor
    anchor: int  # identity of the storage
    lost: bool  # it was overwritten, so that only its value, which got a copy, can still hold it


class Saved:
    """What autograd holds in place of a kept tensor: the tensor, until it is evicted; then a value that is dropped."""

    __slots__ = ("__weakref__", "geometry", "source", "tensor", "value", "version")

    tensor: Tensor | None
    version: int
    source: Source
    value: Value | None
    geometry: Geometry | None

    def there(self) -> Tensor | None:
        """The content, if it has not been evicted.

        Raises:
            RuntimeError: it was changed in place after it was saved, with PyTorch's own words.
        """
        tensor = self.tensor
        if tensor is not None and tensor._version != self.version:
            raise RuntimeError(MODIFIED)
        return tensor


def verdict_on(func: Any) -> int:
    """What may be done with an op: NEVER, AGAIN, NOTE or NOTE_RULE."""
    rule = rule_for(func)
    if rule.form in ("blank", "view") or (rule.form == "pure" and rule.kind == "factory"):
        return AGAIN
    if rule.form != "pure" or rule.kind not in ("expensive", "cheap"):
        return NEVER
    if rule.hidden:
        return NEVER  # running statistics may have been updated
    return NOTE_RULE if rule.transfers or rule.inner or rule.random else NOTE


class Sources(Store):
    """The table of sources, and noting.

    Attributes:
        eviction: looks after what is kept; None: nothing is noted.
        sources: what each storage holds.
        paused: ops are only called, for as long as a replay runs.
        count: ops recorded so far, over all steps; gives ops their order.
        position: how many counted ops have run in this step, where a plan counts them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.eviction: Any = None
        self.sources: dict[Any, Source] = {}
        self.paused = False
        self.count = 0
        self.position = 0
        self._forget_source = forgetter(self.sources)
        self._verdicts: dict[int, int] = {}

    def clear(self) -> None:
        """Forget the step: nothing that autograd does not hold stays alive."""
        super().clear()
        self.sources.clear()
        if self.eviction is not None:
            self.eviction.prune()

    def verdict(self, func: Any) -> int:
        """What :func:`verdict_on` says, kept."""
        found = self._verdicts.get(id(func))
        if found is None:
            found = self._verdicts[id(func)] = verdict_on(func)
        return found

    # ------------------------------------------------------------------ what ops make

    def _note_kept(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note an op that was only called, if it is one that can be run again."""
        verdict = self._verdicts.get(id(func))
        if verdict is None:
            verdict = self.verdict(func)
        if verdict < NOTE or not _grad_enabled():
            return
        rule = None
        if verdict == NOTE_RULE:
            rule = rule_for(func)
            if is_drawn(rule, args) or rule.inner or crosses_bus(rule, args, kwargs):
                return
        self._note(func, args, kwargs, out, None, rule)

    def _note(self, func: Any, args: Any, kwargs: Any, out: Any, rng: RecordedState | None, rule: Rule | None) -> None:
        """Note how ``out`` was made. What shares a storage with an input is no new content."""
        recipe = Recipe()
        try:
            recipe.func = func
            recipe.args = self._sources_of(args, rule)
            recipe.extra = None
            if kwargs or rule is not None:
                keywords = dict(zip(kwargs, self._sources_of(kwargs.values(), None), strict=True)) if kwargs else {}
                recipe.extra = (keywords, rule, None)
            recipe.op = None
            recipe.position = self.position - 1
            # A recipe must not hold a generator's state, which is memory: the op does, for as long as it lives.
            op = self._note_outputs(recipe if rng is None else None, out)
        except (Unrecordable, NotImplementedError, RuntimeError):
            return
        if op is None:
            recipe.index = self.count = self.count + 1
            return
        recipe.index = op.index
        recipe.op = weakref(op)
        moves = self.eviction.mover is not None
        _link(op.args, recipe.args, op.needs, moves)
        if op.extra is not None and op.extra[0]:
            _link_keywords(op.extra[0], recipe.extra[0], op.needs, moves)  # type: ignore[index]  # both or none

    def _note_write(self, op: Op, args: Any, kwargs: dict[str, Any], needs: list[Value]) -> None:
        """Let the values that a write refers to know their sources; what it makes has no recipe."""
        sources = self._sources_of(args, None)
        if op.args[0].__class__ is not tuple:
            sources[0] = None
        moves = self.eviction.mover is not None
        _link(op.args, sources, needs, moves)
        if kwargs:
            keywords = dict(zip(kwargs, self._sources_of(kwargs.values(), None), strict=True))
            _link_keywords(op.extra[0], keywords, needs, moves)  # type: ignore[index]  # it has been set

    def _note_outputs(self, recipe: Recipe | None, out: Any) -> Op | None:
        """A source for each output in a storage of its own; returns the op's record, if any of them was dropped."""
        sources = self.sources
        dropped = self.dropped
        op = None
        position = -1
        for o in out if isinstance(out, (tuple, list)) else (out,):
            position += 1
            if o.__class__ is not Tensor or o.layout is not _STRIDED:
                continue
            storage = o.untyped_storage()
            key = weakref(storage, self._forget_source)
            source = sources.get(key)
            if source is not None:
                if recipe is not None and source.recipe is recipe:
                    source.recipe = None  # two outputs in one storage
                continue
            source = Source()
            source.recipe = recipe
            source.position = position
            source.geometry = (o.size(), o.stride(), o.storage_offset(), o.dtype)
            source.value = source.parameter = source.tensor = None
            source.saved = []
            source.version = 0
            source.anchor = id(storage)
            source.lost = False
            sources[key] = source
            self.eviction.known.append(weakref(source))
            if dropped:
                value = dropped.get(key)
                if value is not None:
                    source.value = weakref(value)
                    value.source = source
                    op = value.op
        return op

    def _sources_of(self, args: Any, rule: Rule | None) -> list[Any]:
        """``args`` with tensors replaced by (source, geometry)."""
        sources = self.sources
        out: list[Any] = []
        for a in args:
            kind = a.__class__
            if kind is Tensor or kind is torch.nn.Buffer:
                source = sources.get(weakref(a.untyped_storage()))
                if source is not None and source.version is not None and a._version > source.version:
                    self._lose_source(weakref(a.untyped_storage()))  # to whom we did not see
                    source = None
                if source is None:
                    source = self._new_leaf(a)
                if self.bits:
                    a = (source, geometry_of(a))
                else:
                    a = (source, (a.size(), a.stride(), a.storage_offset(), a.dtype))
            elif kind is Parameter:
                source = sources.get(weakref(a.untyped_storage()))
                if source is None:
                    source = self._new_leaf(a)
                a = (source, None if source.parameter is a else geometry_of(a))
            elif kind in CONSTANTS:
                pass
            elif kind is list:
                a = self._sources_of(a, None)
            else:
                raise Unrecordable
            out.append(a)
        if rule is not None and rule.hidden and (rule.training is None or args[rule.training]):
            for i in rule.hidden:
                if i < len(args) and isinstance(args[i], Tensor):
                    out[i] = (_as_it_is(args[i]), geometry_of(args[i]))
        return out

    def _new_leaf(self, tensor: Tensor) -> Source:
        """A source for content of which no recipe is known."""
        if tensor.is_conj() or tensor.is_neg():
            self.bits = True
        storage = tensor.untyped_storage()
        source = _leaf(tensor)
        self.sources[weakref(storage, self._forget_source)] = source
        return source

    # ------------------------------------------------------------------ what becomes of it

    def _save(self, tensor: Tensor, key: Any, version: int) -> Any:
        """What autograd gets for a kept tensor."""
        source = self.sources.get(key)
        if source is None:
            source = self._new_leaf(tensor)
        elif source.version != version:
            self._lose_source(key)  # by whom we did not see
            source = self._new_leaf(tensor)
        if source.parameter is not None:
            return (tensor, version)
        saved = Saved()
        # Without history: a view would hold its base, which would then look as if the program held it.
        with _NoModes():
            saved.tensor = alias(tensor)
        saved.version = version
        saved.source = source
        saved.value = saved.geometry = None
        source.saved.append(weakref(saved))
        return saved

    def _lose_source(self, key: Any) -> None:
        """The storage holds other content from now on: what has been saved of the old one is no longer that."""
        source = self.sources.pop(key, None)
        if source is not None:
            source.lost = True
            source.saved.clear()
            source.tensor = source.parameter = None


def _leaf(tensor: Tensor) -> Source:
    source = Source()
    source.recipe = source.geometry = source.value = source.tensor = source.parameter = None
    source.position = 0
    source.saved = []
    source.version = None if tensor.is_inference() else tensor._version
    source.anchor = id(tensor.untyped_storage())
    source.lost = False
    owner = tensor if isinstance(tensor, Parameter) else tensor._base
    if isinstance(owner, Parameter):
        source.parameter = owner
    else:
        source.tensor = weakref(tensor)
    return source


def _as_it_is(tensor: Tensor) -> Source:
    """Running statistics that an op in training updates: whatever they hold by then will do, its outputs ignore it."""
    source = _leaf(tensor)
    source.version = None
    return source


def _link(references: list[Any], sources: list[Any], needs: list[Value], moves: bool) -> None:
    """Let the values that a recorded op refers to know their sources, and wait for them should they be evicted.

    With ``moves`` that can happen to those without a recipe as well.
    """
    for i, (reference, source) in enumerate(zip(references, sources, strict=True)):
        if source.__class__ is list:
            _link(reference, source, needs, moves)
        elif source.__class__ is tuple:
            value: Value = reference[0]
            s: Source = source[0]
            if s.parameter is not None or s.version is None:
                continue
            if s.value is None or s.value() is None:
                s.value = weakref(value)
                value.source = s
            if (s.recipe is None and not moves) or value.tensor is None:
                continue
            if value.flags & HELD:
                with _NoModes():
                    value.tensor = alias(value.tensor)
                value.flags &= ~HELD
            if value.geometry is None:
                value.geometry = geometry_of(value.tensor)
            needs.append(value)
            if reference[1] is None:
                references[i] = (value, value.geometry)


def _link_keywords(keywords: dict[str, Any], sources: dict[str, Any], needs: list[Value], moves: bool) -> None:
    references = list(keywords.values())
    _link(references, list(sources.values()), needs, moves)
    keywords.update(zip(keywords, references, strict=True))


def crosses_bus(rule: Rule, args: Any, kwargs: Any) -> bool:
    """Whether the op moves its input to another device."""
    return rule.transfers and bool(kwargs) and kwargs.get("device") not in (None, args[0].device)


def is_drawn(rule: Rule, args: Any) -> bool:
    """Whether the call draws from a generator; attention without dropout does not."""
    return rule.kind == "random" or (rule.dropout is not None and rule.dropout < len(args) and bool(args[rule.dropout]))


def is_recipe(rule: Rule, args: Any) -> bool:
    """Whether what the call makes can be made again without anything but its arguments."""
    return rule.form == "pure" and rule.kind in ("expensive", "cheap") and not is_drawn(rule, args)
