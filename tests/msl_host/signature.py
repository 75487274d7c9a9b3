"""The text that MLX would compile for a call of `mx.fast.metal_kernel`, and the same kernel as text for clang.

MLX (0.32) writes the signature from the call: an input below 8 elements sits in `constant`, one of no dimension is a
reference; `NAME_shape`, `NAME_strides`, `NAME_ndim` and the 20 attributes appear where `source` has the word.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from tests.msl_host.arrays import Input, metal_type, mlx_dtype

# Attribute, type, and its index in `Attributes` of runtime.h. In MLX's order.
_ATTRIBUTES = [
    ("dispatch_quadgroups_per_threadgroup", "uint", 30),
    ("dispatch_simdgroups_per_threadgroup", "uint", 26),
    ("dispatch_threads_per_threadgroup", "uint3", 12),
    ("grid_origin", "uint3", 31),
    ("grid_size", "uint3", 18),
    ("quadgroup_index_in_threadgroup", "uint", 28),
    ("quadgroups_per_threadgroup", "uint", 29),
    ("simdgroup_index_in_threadgroup", "uint", 23),
    ("simdgroups_per_threadgroup", "uint", 24),
    ("thread_execution_width", "uint", 25),
    ("thread_index_in_quadgroup", "uint", 27),
    ("thread_index_in_simdgroup", "uint", 22),
    ("thread_index_in_threadgroup", "uint", 21),
    ("thread_position_in_grid", "uint3", 6),
    ("thread_position_in_threadgroup", "uint3", 0),
    ("threadgroup_position_in_grid", "uint3", 3),
    ("threadgroups_per_grid", "uint3", 15),
    ("threads_per_grid", "uint3", 18),
    ("threads_per_simdgroup", "uint", 25),
    ("threads_per_threadgroup", "uint3", 9),
]
# An input below this many elements sits in `constant`.
MAX_CONSTANT_ELEMENTS = 8
# Lines of `header` and `source` in what clang reads: the number alone tells which of them it is.
HEADER_LINE, SOURCE_LINE = 1_000_000, 2_000_000


@dataclass(frozen=True, slots=True)
class Parameter:
    """One buffer of the signature. `role`: input, shape, strides, ndim, output; `index` of that input or output."""

    name: str
    role: str
    index: int
    space: str
    type: str
    is_reference: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """A kernel with its types bound.

    `title` names it for people, `kernel_name` is MLX's. `mlx_text` is what MLX would compile, `host_text` what
    clang does; `parameters` in the order of the buffers.
    """

    title: str
    kernel_name: str
    mlx_text: str
    host_text: str
    parameters: list[Parameter]
    template: str


def write_signature(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    atomic_outputs: bool,
    inputs: Sequence[Input],
    output_dtypes: Sequence[mx.Dtype],
    template: Sequence[tuple[str, Any]],
) -> Signature:
    """Both texts of one call."""
    parameters = _parameters(input_names, output_names, source, atomic_outputs, inputs, output_dtypes)
    attributes = [attribute for attribute in _ATTRIBUTES if attribute[0] in source]
    bound = [(argument, *_template_argument(value)) for argument, value in template]
    values = ", ".join(value for _, _, value in bound)
    kernel_name = "_".join(
        [
            f"custom_kernel_{name}",
            *([f"_{'_'.join(value for _, _, value in bound)}"] if bound else []),
            *(metal_type(i.dtype) + ("s" if i.ndim == 0 else "c" if _is_small(i) else "") for i in inputs),
            *(metal_type(dtype) for dtype in output_dtypes),
        ]
    )
    mlx_text = _mlx_text(kernel_name, header, source, bound, values, parameters, attributes)
    host_text = _host_text(header, source, bound, parameters, attributes)
    shown = ", ".join(f"{argument}={value}" for argument, _, value in bound)
    title = f"{name}<{shown}>" if shown else name
    return Signature(title, kernel_name, mlx_text, host_text, parameters, shown)


def _is_small(value: Input) -> bool:
    return value.size < MAX_CONSTANT_ELEMENTS


def _parameters(
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    atomic_outputs: bool,
    inputs: Sequence[Input],
    output_dtypes: Sequence[mx.Dtype],
) -> list[Parameter]:
    parameters = []
    for index, (name, value) in enumerate(zip(input_names, inputs, strict=True)):
        space = "constant" if _is_small(value) else "device"
        parameters.append(Parameter(name, "input", index, f"const {space}", metal_type(value.dtype), value.ndim == 0))
        if value.ndim == 0:
            continue
        for role, kind, is_reference in (("shape", "int", False), ("strides", "int64_t", False), ("ndim", "int", True)):
            if f"{name}_{role}" in source:
                parameters.append(Parameter(f"{name}_{role}", role, index, "const constant", kind, is_reference))
    for index, (name, dtype) in enumerate(zip(output_names, output_dtypes, strict=True)):
        kind = f"atomic<{metal_type(dtype)}>" if atomic_outputs else metal_type(dtype)
        parameters.append(Parameter(name, "output", index, "device", kind, False))
    return parameters


def _template_argument(value: Any) -> tuple[str, str]:
    """Kind of the template parameter and the text of its value."""
    if isinstance(value, bool):
        return "bool", str(int(value))
    if isinstance(value, int):
        return "int", str(value)
    if isinstance(value, mx.Dtype):
        return "typename", metal_type(mlx_dtype(value))
    raise TypeError(f"a template argument is a bool, an int or an mx.Dtype, not {value!r}")


def _mlx_text(
    kernel_name: str,
    header: str,
    source: str,
    bound: Sequence[tuple[str, str, str]],
    values: str,
    parameters: Sequence[Parameter],
    attributes: Sequence[tuple[str, str, int]],
) -> str:
    declared = [
        f"  {p.space} {p.type}{'&' if p.is_reference else '*'} {p.name} [[buffer({number})]]"
        for number, p in enumerate(parameters)
    ]
    declared += [f"  {kind} {name} [[{name}]]" for name, kind, _ in attributes]
    text = header
    if bound:
        text += f"template <{', '.join(f'{kind} {argument}' for argument, kind, _ in bound)}>\n"
    text += f"[[kernel]] void {kernel_name}(\n" + ",\n".join(declared) + ") {\n" + source + "\n}\n"
    if bound:
        instance = f"{kernel_name}<{values}>"
        text += f'\ntemplate [[host_name("{kernel_name}")]] [[kernel]] decltype({instance}) {instance};\n'
    return text


def _host_text(
    header: str,
    source: str,
    bound: Sequence[tuple[str, str, str]],
    parameters: Sequence[Parameter],
    attributes: Sequence[tuple[str, str, int]],
) -> str:
    """C++ for OpenCL has no template kernels and no kernel arguments of pointers to bool or of references.

    So buffers come as addresses, and template arguments are bound by name at the beginning of the kernel.
    """
    declared = [f"ulong {p.name}__address" for p in parameters] + [f"{kind} {name}" for name, kind, _ in attributes]
    given = [f"buffers[{number}]" for number in range(len(parameters))]
    for _, kind, at in attributes:
        given.append(
            f"uint3{{attributes[{at}], attributes[{at + 1}], attributes[{at + 2}]}}"
            if kind == "uint3"
            else f"attributes[{at}]"
        )
    binds = [
        f"typedef {value} {argument};" if kind == "typename" else f"constexpr {kind} {argument} = {value};"
        for argument, kind, value in bound
    ]
    for p in parameters:
        cast = f"({p.space} {p.type}*){p.name}__address"
        binds.append(
            f"{p.space} {p.type}& {p.name} = *{cast};" if p.is_reference else f"{p.space} {p.type}* {p.name} = {cast};"
        )
    return (
        f'#line {HEADER_LINE + 1} "header.metal"\n{header}\n#line 1 "generated"\n'
        f"__kernel void msl_kernel({', '.join(declared)}) {{ {' '.join(binds)}\n"
        f'#line {SOURCE_LINE + 1} "source.metal"\n{source}\n}}\n'
        '#line 1 "generated"\n'
        'extern "C" void msl_entry(const thread ulong* buffers, const thread uint* attributes) '
        f"{{ msl_kernel({', '.join(given)}); }}\n"
        'extern "C" device char __start_msl_group[] __attribute__((weak, visibility("hidden")));\n'
        'extern "C" device char __stop_msl_group[] __attribute__((weak, visibility("hidden")));\n'
        'extern "C" ulong msl_group_bound(int end) '
        "{ return end ? (ulong)__stop_msl_group : (ulong)__start_msl_group; }\n"
    )
