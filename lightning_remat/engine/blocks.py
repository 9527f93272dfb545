"""Finding a model's blocks: the repeated sibling modules that hold most of its compute.

A transformer's layers, a ResNet's bottlenecks. What is looked for are siblings of one class that have submodules of
their own; where a parent is only a stage (a named container around repeated modules, as in ResNet or Swin), its
children are taken instead of the stages themselves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lightning_remat.engine.policies import matches
from lightning_remat.errors import ConfigurationError

Named = list[tuple[str, nn.Module]]


def find_blocks(root: nn.Module) -> Named:
    """The blocks of ``root`` as (qualified name, module), in order of registration; [] if nothing repeats."""
    return list(_repeated(root, "", set()))


def find_units(root: nn.Module) -> Named:
    """What stands in for blocks where nothing repeats: the topmost submodules that have parts of their own."""
    found: Named = []
    for name, child in root.named_children():
        if is_compiled(child) or not has_parameters(child):
            continue
        if is_container(child):
            found += [(f"{name}.{n}", m) for n, m in find_units(child)]
        elif any(True for _ in child.children()):
            found.append((name, child))
    return found


def _repeated(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    children = [
        (f"{prefix}{name}", child)
        for name, child in module.named_children()
        if id(child) not in seen and not is_compiled(child)
    ]
    seen.update(id(child) for _, child in children)
    in_a_row = isinstance(module, (nn.Sequential, nn.ModuleList))
    candidates = {id(child) for _, child in children if is_candidate(child) or (in_a_row and _is_own_leaf(child))}
    groups: dict[type, int] = defaultdict(int)
    for _, child in children:
        groups[type(child)] += id(child) in candidates
    for name, child in children:
        if groups[type(child)] >= 2 and id(child) in candidates and not _is_stage(child):
            yield name, child
        else:
            yield from _repeated(child, f"{name}.", seen)


def is_candidate(module: nn.Module) -> bool:
    """Whether a module could be a block: it has trainable or frozen parameters, and parts."""
    return not is_container(module) and any(True for _ in module.children()) and has_parameters(module)


def _is_own_leaf(module: nn.Module) -> bool:
    """Whether a module without parts is a class of the user's: one op of ``torch.nn`` is not worth a block."""
    own = not type(module).__module__.startswith("torch.nn.")
    return own and has_parameters(module) and next(module.children(), None) is None


def is_container(module: nn.Module) -> bool:
    """Whether a module only holds others and is not called itself (ModuleList, ModuleDict)."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict))


def has_parameters(module: nn.Module) -> bool:
    """Whether there is any parameter in it."""
    return next(module.parameters(), None) is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether the module's call is compiled or scripted, so that hooks do not belong inside."""
    return (
        isinstance(module, torch.jit.ScriptModule)
        or hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def _is_stage(module: nn.Module) -> bool:
    """Whether a module is little more than a row of blocks, so that these are the blocks and not the module.

    Besides its row it may have one other part (a downsampling layer) or any number of leaves (an embedding, norms).
    What stands in the row must be worth a block of its own: a bottleneck that holds its convolutions in a row is a
    block, and so is a layer with a row of experts beside its attention.
    """
    if isinstance(module, nn.Sequential):
        return _is_row(module)
    parts = [child for child in module.children() if has_parameters(child)]
    rows = [child for child in parts if isinstance(child, (nn.Sequential, nn.ModuleList)) and _is_row(child)]
    others = [child for child in parts if child not in rows]
    return len(rows) == 1 and (len(others) <= 1 or not any(True for part in others for _ in part.children()))


def _is_row(module: nn.Module) -> bool:
    """Whether a module holds at least two of one class, each with more than one weight matrix (or kernel)."""
    groups: dict[type, int] = defaultdict(int)
    for child in module.children():
        if is_candidate(child) and sum(p.ndim >= 2 for p in child.parameters()) >= 2:
            groups[type(child)] += 1
    return max(groups.values(), default=0) >= 2


def select_blocks(root: nn.Module, wanted: object) -> Named:
    """The modules that the user named as blocks: by class, name pattern, module, or a list of these.

    Raises:
        ConfigurationError: an entry matches nothing, with what there is; or is none of these.
    """
    entries: Sequence[object] = list(wanted) if isinstance(wanted, (list, tuple, set)) else [wanted]
    chosen: dict[int, tuple[str, nn.Module]] = {}
    for entry in entries:
        hits = [(name, module) for name, module in root.named_modules() if name and _selects(entry, name, module)]
        if not hits and _selects(entry, "", root):
            hits = [(type(root).__name__, root)]  # a loop that calls its blocks one by one
        if not hits:
            raise ConfigurationError(f"blocks={entry!r} matches no submodule of {type(root).__name__}; {there(root)}")
        chosen.update({id(module): (name, module) for name, module in hits})
    order = {id(module): i for i, (_, module) in enumerate(root.named_modules())}
    named = sorted(chosen.values(), key=lambda pair: order[id(pair[1])])
    return outermost(named)


def check_blocks_option(wanted: object) -> None:
    """Refuse a value of ``blocks=`` that could never name a module.

    Raises:
        ConfigurationError: it is none of the accepted kinds, or an empty list.
    """
    entries: Sequence[object] = list(wanted) if isinstance(wanted, (list, tuple, set)) else [wanted]
    if not entries:
        raise ConfigurationError("blocks=[] names nothing; leave it out to have blocks found, or use policy='none'.")
    for entry in entries:
        is_class = isinstance(entry, type) and issubclass(entry, nn.Module)
        if not (is_class or (isinstance(entry, str) and entry) or isinstance(entry, nn.Module)):
            raise ConfigurationError(
                f"blocks={entry!r}: give a module class, a name pattern such as 'layers.*', a module, or a list "
                "of these."
            )


def _selects(entry: object, name: str, module: nn.Module) -> bool:
    if isinstance(entry, str):
        return bool(name) and matches(entry, name)
    if isinstance(entry, type):
        return isinstance(module, entry)
    return module is entry


def outermost(named: Named) -> Named:
    """Without the modules that lie inside another one of the list."""
    names = {name for name, _ in named}
    return [(n, m) for n, m in named if not any(n.startswith(f"{other}.") for other in names if other != n)]


def there(root: nn.Module) -> str:
    """A sentence that says which names and classes a model has, for error messages."""
    names = [name for name, _ in root.named_modules() if name]
    classes = sorted(
        {type(m).__name__ for m in root.modules() if any(True for _ in m.children())} - {type(root).__name__}
    )
    if not names:
        return "it has no submodules."
    shown = ", ".join(names[:12]) + (f", ... ({len(names)} in all)" if len(names) > 12 else "")
    return f"there are the names {shown}" + (f" and the classes {', '.join(classes[:8])}." if classes else ".")
