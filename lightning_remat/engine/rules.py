"""What the tape has to know about an op, read once from its schema and kept.

Every overload is looked at the first time it is seen. The verdict has two independent parts: its *form* (is it a view,
does it write into an argument, does it make an uninitialised tensor) decides how it is recorded, and its *kind* (how
dear it is to run again, is it random, may it be run again at all) is what policies choose by.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

Form = Literal["view", "pure", "write", "blank", "higher"]
Kind = Literal["expensive", "cheap", "random", "factory", "fixed"]


def _aten(names: str) -> frozenset[str]:
    return frozenset(f"aten::{name}" for name in names.split())


# Outputs alias an input although the schema does not say so.
_SILENT_VIEWS = frozenset(
    {
        "aten::_unsafe_view",
        "aten::unsafe_split",
        "aten::unsafe_split_with_sizes",
        "aten::unsafe_chunk",
        "aten::_reshape_alias",
        "aten::lift_fresh",
        "aten::lift",
        "aten::detach",
        "aten::alias",
        "aten::_conj",
        "aten::_neg_view",
        "aten::view_as_real",
        "aten::view_as_complex",
        "aten::_fw_primal",
        "aten::_make_dual",
        "aten::_values",
        "aten::_indices",
        "aten::values",
        "aten::indices",
    }
)

# Memory whose content is undefined until something writes to it. Code that the dispatcher does not show (Triton,
# pybind, NumPy) may be what writes, so it is kept, unless a visible op then fills all of it with random numbers.
_BLANK = frozenset(
    {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided"}
)

# Made from nothing and open to invisible writes for the same reason: kept. They are also where global state (default
# dtype, default device) would come in a second time.
_FACTORIES = _aten(
    "zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full arange linspace logspace eye "
    "scalar_tensor tril_indices triu_indices hann_window hamming_window bartlett_window blackman_window "
    "kaiser_window from_file _efficientzerotensor"
)

# In-place ops after which the old content of the written tensor no longer matters.
FILLS = _aten("bernoulli_ uniform_ normal_ random_ exponential_ geometric_ log_normal_ cauchy_ fill_ zero_ copy_")

COLLECTIVES = ("c10d.", "_c10d_functional.", "_c10d_functional_autograd.", "_dtensor.")
"""How names of ops begin whose results may be still on their way when they have returned."""

# Further libraries of PyTorch's own, whose schemas tell what there is to tell.
_TORCHS_OWN = ("fsdp.", "inductor.", "prim.", "profiler.", "streams.", "symm_mem.")

# Dear to run again: matrix products, convolutions, attention, recurrent kernels, factorisations, transforms, sorting.
_EXPENSIVE = _aten(
    "mm addmm bmm baddbmm addbmm addmv mv dot vdot addr _addmm_activation _scaled_mm _grouped_mm _int_mm "
    "_trilinear convolution _convolution convolution_overrideable mkldnn_convolution cudnn_convolution "
    "cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution "
    "_slow_conv2d_forward slow_conv3d_forward slow_conv_transpose2d slow_conv_transpose3d "
    "conv_depthwise3d _conv_depthwise2d slow_conv_dilated2d slow_conv_dilated3d "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_fused_attention_overrideable _flash_attention_forward _efficient_attention_forward "
    "_cudnn_attention_forward "
    "mkldnn_rnn_layer _thnn_fused_lstm_cell _thnn_fused_gru_cell mkldnn_linear "
    "_cdist_forward _pdist_forward grid_sampler_2d grid_sampler_3d _fft_c2c _fft_r2c _fft_c2r "
    "_ctc_loss _cudnn_ctc_loss sort topk kthvalue median mode unique_dim _unique2 histc cumprod "
    "_embedding_bag geqrf ormqr lu_unpack cholesky_inverse cholesky_solve triangular_solve"
)
_EXPENSIVE_STEMS = ("aten::linalg_", "aten::_linalg_")

# Kernels that call ops which depend on lazy conjugation (complex linalg.pinv and lstsq) or on autocast (_trilinear,
# linalg.pinv). The rest of the family is here since its kernel for another device may do so, too. All are so dear that
# a guard around them does not count.
_INNER = _aten("_trilinear cholesky_inverse cholesky_solve geqrf ormqr orgqr lu_unpack triangular_solve pinverse")

# Never run again. The reason stands on the line above each group.
_FIXED = frozenset(
    {
        # They fill an argument with noise while running; that noise is what backward needs.
        "aten::rrelu_with_noise",
        "aten::rrelu_with_noise_functional",
        # They keep their dropout state inside an opaque buffer that they also write.
        "aten::_cudnn_init_dropout_state",
        "aten::_cudnn_rnn",
        "aten::miopen_rnn",
        # Hands storage over rather than computing anything.
        "aten::set_",
        "aten::resize_",
        "aten::resize_as_",
        "aten::record_stream",
        # LAPACK's gelsy, its default driver on the CPU, reads a pivot array that PyTorch leaves uninitialised: the last
        # bits differ from run to run (seen on torch 2.13).
        "aten::linalg_lstsq",
    }
)
# Quantised tensors carry their scale outside the storage; nested and sparse ones keep their shape outside it.
_FIXED_WORDS = ("quantize", "nested", "sparse", "_coo_", "_csr", "_csc", "_bsr", "_bsc", "mkldnn_reorder", "to_mkldnn")

# Running statistics that an op writes although its schema does not say so (positions of the arguments). In training the
# outputs do not depend on them, so a replay gets copies of whatever they hold by then.
_HIDDEN_WRITES: dict[str, tuple[int, ...]] = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
    "aten::_batch_norm_with_update": (3, 4),
    "aten::_native_batch_norm_legit": (3, 4),
}
# Where the op says whether it is training: position of the flag, None if it always is.
_TRAINING_FLAG: dict[str, int | None] = {
    "aten::native_batch_norm": 5,
    "aten::cudnn_batch_norm": 5,
    "aten::miopen_batch_norm": 5,
    "aten::_native_batch_norm_legit": 5,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """The tape's verdict on one overload.

    Attributes:
        name: such as ``"aten.addmm.default"``.
        form: ``view`` (output shares an input's storage), ``pure``, ``write`` (changes an argument), ``blank``, or
            ``higher`` (a higher-order op).
        kind: what policies choose by; ``fixed`` is never recomputed.
        writes: positions (int) and keywords (str) of the arguments that the op changes.
        fills: the old content of the changed argument does not matter.
        draws: it fills its first argument with random numbers.
        in_place: it writes its first argument and nothing else, and may be run again.
        foreign: it comes from another library, whose schema is held against what it does; see
            :mod:`~lightning_remat.engine.untold`.
        bare: such an op without a kernel for autograd, which then follows the ops that its kernel calls.
        moves: it only changes how the argument shows its storage (``unsqueeze_``, ``t_``); no byte is written.
        hidden: positions of running statistics that the op updates on the side.
        training: position of the flag that says whether it updates them; None if it always does.
        transfers: its ``device`` argument may name another device than that of its input.
        dropout: position of the dropout probability, if the op is random only when that is above zero.
        inner: it calls ops that depend on keys above Python; see :func:`~lightning_remat.engine.plain.call_as_plain`.
            Among them are writes to lists (``_foreach_mul_``), which leave version counters to the ops they call.
    """

    name: str
    form: Form
    kind: Kind
    writes: tuple[int | str, ...] = ()
    fills: bool = False
    moves: bool = False
    hidden: tuple[int, ...] = ()
    training: int | None = None
    dropout: int | None = None
    transfers: bool = False
    inner: bool = False
    in_place: bool = False
    draws: bool = False
    foreign: bool = False
    bare: bool = False

    @property
    def random(self) -> bool:
        """Whether running it draws from a generator."""
        return self.kind == "random" or self.dropout is not None


_AUTOGRAD = (
    "Autograd",
    "AutogradOther",
    "AutogradCPU",
    "AutogradCUDA",
    "AutogradMPS",
    "AutogradXPU",
    "AutogradPrivateUse1",
)

# By identity: overloads live for ever, and hashing one is a Python call. The entry holds on to its overload too.
_rules: dict[int, tuple[Rule, Any]] = {}


def rule_for(func: Any) -> Rule:
    """The verdict on an overload (or higher-order op), made at most once."""
    found = _rules.get(id(func))
    if found is None:
        found = _rules[id(func)] = (_make_rule(func), func)
    return found[0]


def set_rule(func: Any, rule: Rule) -> None:
    """Another verdict, from now on."""
    _rules[id(func)] = (rule, func)


def _make_rule(func: Any) -> Rule:
    if not isinstance(func, torch._ops.OpOverload):
        # A higher-order op (flex_attention, cond, ...): its body is not ours to run again.
        return Rule(name=str(func), form="higher", kind="fixed")
    schema = func._schema
    name = str(func)
    base = schema.name
    writes: list[int | str] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes.append(argument.name if argument.kwarg_only else position)
    hidden = _HIDDEN_WRITES.get(base, ())
    if hidden and base.endswith("batch_norm_legit") and func._overloadname == "no_stats":
        hidden = ()
    if base.startswith("c10d::") and base.endswith("_"):
        writes = [0]  # of which the schemas of torch.distributed's own do not tell
    form = _form(func, base, bool(writes) and not hidden)
    foreign = _is_foreign(base, name)
    bare = foreign and not _has_autograd(func)
    if bare and form == "view":
        form = "pure"  # only so is it called as a foreign one is; whose memory it shows is seen by the storage
    kind = _kind(func, base, form)
    dropout = None
    if torch.Tag.nondeterministic_seeded in func.tags and kind != "fixed":
        for position, argument in enumerate(schema.arguments):
            if argument.name in ("dropout_p", "dropout"):
                dropout = position
        if dropout is None:
            kind = "random"
    moves = torch.Tag.inplace_view in func.tags and base not in _FIXED
    inner = form != "view" and (base in _INNER or base.startswith(_EXPENSIVE_STEMS))
    inner = inner or (form == "write" and not _counts(func))
    return Rule(
        name=name,
        form=form,
        kind=kind,
        writes=tuple(writes) if form == "write" else (),
        fills=base in FILLS,
        moves=moves,
        hidden=hidden,
        training=_TRAINING_FLAG.get(base),
        dropout=dropout,
        transfers=base == "aten::_to_copy",
        inner=inner,
        draws=base in FILLS and kind == "random",
        foreign=form in ("pure", "write") and foreign,
        bare=bare,
        in_place=form == "write" and writes == [0] and kind != "fixed" and not moves and not inner,
    )


def _is_foreign(base: str, name: str) -> bool:
    return not base.startswith(("aten::", "prims::")) and not name.startswith((*COLLECTIVES, *_TORCHS_OWN))


def _has_autograd(func: Any) -> bool:
    """Whether an op has a kernel of its own for autograd, on any device; else PyTorch's fallback stands in."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key) for key in _AUTOGRAD)


def _counts(func: Any) -> bool:
    """Whether autograd bumps the version counters of what a write changes; else ops that its kernel calls do."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "ADInplaceOrView"))


def _form(func: Any, base: str, writes: bool) -> Form:
    if writes:
        return "write"
    if base in _BLANK:
        return "blank"
    if base in _SILENT_VIEWS or func.is_view:
        return "view"
    return "pure"


def _kind(func: Any, base: str, form: Form) -> Kind:
    if not base.startswith("aten::") and not base.startswith("prims::"):
        # Collectives, all-gathers, user-registered kernels: they may communicate, draw or have effects.
        return "fixed"
    if base in _FIXED or any(word in base for word in _FIXED_WORDS):
        return "fixed"
    if base in _FACTORIES:
        return "factory"
    if form == "write" and any(argument.kwarg_only for argument in func._schema.arguments if _written(argument)):
        return "fixed"  # out= may resize what it writes into
    if base in _EXPENSIVE or base.startswith(_EXPENSIVE_STEMS):
        return "expensive"
    return "cheap"


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)
