"""The private names of JAX that `statetx/_jax` uses: what each is for, and which public name would replace it.

`test_compat.py` compares the table with the sources, and asks this JAX for each name and its parameters.
"""

import ast
import importlib
import inspect
import pathlib

FOLDER = pathlib.Path(__file__).parents[1] / "statetx" / "_jax"

# Module below jax._src, then lines of ``names: what for | public way``.
TABLE = """
ad_checkpoint
    __name__: tells the operations of jax_remat3 from others of hijax | none
    _insert_reduce_precision: is replaced, so that residuals that are exact are not copied | none
    name_p remat_p: equations of names and regions, made of staged jaxprs | jax.checkpoint, which traces a function
ad_util
    Zero instantiate: zero tangents in rules | jax.custom_derivatives.SymbolicZero, in jax.custom_jvp only
array
    ArrayImpl: the type of concrete arrays, for fast tests | isinstance(x, jax.Array), ten times as slow
checkify
    checkify_jaxpr error_checks: checks inside calls that are one equation | none
callback
    io_callback_p pure_callback_p: are noticed, since a function on the host may raise late | none
config
    _check_vma debug_key_reuse disable_jit enable_compilation_cache: values of options | jax.config, for some
    trace_context: key of what a trace depends on | none
core
    ClosedJaxpr Jaxpr Literal Var: the parts of programs | jax.extend.core
    DebugInfo DropVar: names of staged functions; results that nothing reads | none
    JaxprPpContext JaxprPpSettings pp_eqn: equations as JAX prints them, with names of ours | Jaxpr.pretty_print, whose names are letters
    InternalMutableArrayEffect internal_mutable_array_effect no_effects: effects of equations that are made or hidden | none
    OpaqueTraceState: flax's note of the trace of an object | jax.extend.core.get_opaque_trace_state
    Primitive: primitives of this package | jax.extend.core.Primitive
    ShapedArray Tracer: types of arrays and of traced values | jax.core.ShapedArray, jax.core.Tracer
    eval_jaxpr jaxpr_as_fun: evaluation of jaxprs | jax.extend.core.jaxpr_as_fun
    eval_trace trace_ctx set_current_trace: the trace that operations go to | none
    extend_axis_env_nd no_axis_name top_axis_env: axis names of jax.vmap and jax.shard_map | none
    freeze_p: frozen Refs of the caller are read | none
    jaxprs_in_params: the jaxprs in an equation | none
    mapped_leading_aval: the type that a step of a loop gets | none
    mapped_aval unmapped_aval physical_aval: types of slices, of stacks, and of what extended dtypes are made of | none
    new_jaxpr_eqn: new equations | jax.extend.core.new_jaxpr_eqn
    positional_effects: effects of a call | none
    pytype_aval_mappings: the types of links and of values of hijax; errors for states that are used as arrays | none
custom_derivatives
    __file__: frames that call derivative rules | none
debugging
    debug_effect ordered_debug_effect: programs for targets are without them | none
    debug_callback_p: as io_callback_p | none
dispatch
    apply_primitive: runs a primitive that nothing traces | none
dtypes
    ExtendedDType register_canonicalize_value_handler: the dtype of links | none
    canonicalize_value_handlers: errors for states that are used as arrays | none
earray
    EArray: arrays of extended dtypes | none
effects
    ordered_effects: their tokens go through branches | none
    remat_allowed_effects: what may run again in a region | none
flattree
    nones pack: the structure of a scan's operands, since jax 0.12 | none
hijax
    HiPspec HiType MappingSpec: base classes of types, and of how they are divided and mapped | jax.experimental.hijax, not all in 0.10
interpreters.ad
    backward_pass backward_pass3: whether a backward pass is running, which calls derivative rules | none
    JVPTracer LinearizeTracer: the primal of a value that is differentiated | none
    custom_lin_p: custom_vjp in linearized programs | none
    fallback_linearize_rule primitive_jvps primitive_linearizations primitive_transposes: rules of this package's primitives | jax.interpreters.ad
    is_undefined_primal: linear operands, in transpose rules | jax.interpreters.ad
    jvp_jaxpr: which outputs have tangents | none
    linearize: is replaced, so that functions that are differentiated are seen | none
interpreters.batching
    BatchTrace BatchTracer: which values differ between examples | none
    batch_jaxpr: maps jaxprs, as the rule of scan does | none
    bdim_at_front broadcast: moves batch axes | jax.interpreters.batching
    is_vmappable: which values JAX maps by rules for their type | none
    fancy_primitive_batchers primitive_batchers: rules of this package's primitives | jax.interpreters.batching
interpreters.mlir
    TokenSet: tokens of ordered effects behind the branch | none
    _lowerings: JAX's own lowering of regions, within ours | none
    dtype_to_ir_type full_like_aval lower_with_sharding_in_types: lowering of the fence and of links | none
    lower_fun register_lowering: lowering of this package's primitives | jax.interpreters.mlir
interpreters.partial_eval
    DynamicJaxprTrace DynamicJaxprTracer JaxprTracer: recording traces and their values | none
    Offloadable Recompute RecomputeType Saveable ensure_enum: answers of policies | none
    custom_partial_eval_rules: calls that change where JAX linearizes a program around them | none
    dce_jaxpr: removes dead code | none
    partial_eval_jaxpr_custom_rules: how stored values divide into passes | none
    trace_to_jaxpr_dynamic: stages functions to which inputs are added while they are traced | jax.make_jaxpr, which adds none
interpreters.pxla
    _create_device_list: devices of a program for a target | none
    global_result_handlers shard_arg_handlers: links outside of programs | none
lax.control_flow.loops
    _empty_array: arrays that loops write | none
    scan_p while_p: loops of staged bodies | jax.extend.core.primitives
lax.lax
    _convert_element_type: changes weak types | none
linear_util
    StoreException WrappedFun wrap_init: derivative rules in equations | jax.extend.linear_util, for some
literals
    TypedComplex TypedFloat TypedInt TypedNdArray: constants made while tracing | none
mesh
    get_concrete_mesh: the devices of the mesh in force | jax.sharding.get_mesh, which fails under a trace
pjit
    _trace_for_jit: is replaced, so that a plan rewrites jitted steps | none
sharding_impls
    UNSPECIFIED: shardings that are not given, in equations of jit | none
    physical_sharding: of links | none
source_info_util
    current current_name_stack user_context: source lines of equations | none
    register_exclusion: the user's lines in messages | none
state.discharge
    discharge_state register_discharge_rule: Refs as inputs and outputs, of calls that are one equation, too | none
state.types
    AbstractRef: the type of a Ref | none
    AccumEffect WriteEffect: writes of Refs by functions with derivative rules | none
traceback_util
    api_boundary register_exclusion: tracebacks without lines of statetx | none
tree_util
    dispatch_registry: links as trees | jax.tree_util.register_pytree_node, which treats them as containers
util
    register_cache: caches that jax.clear_caches clears | none
    weakref_lru_cache: a cache of what is found in a jaxpr, for as long as it lives | none
jaxlib.mlir.ir
    RankedTensorType: types of lowered values | jax.interpreters.mlir.ir
"""

OPTIONAL = {
    "core.ClosedJaxpr",
    "flattree.nones",
    "flattree.pack",
}
"""Names that some supported versions do not have."""

# The parameters that our calls rely on, by position or by name.
NEEDED = {
    "ad_checkpoint._insert_reduce_precision": "jaxpr num_res",
    "checkify.checkify_jaxpr": "jaxpr enabled_errors error",
    "core.new_jaxpr_eqn": "invars outvars primitive params effects source_info ctx",
    "core.mapped_aval": "size axis aval",
    "core.unmapped_aval": "size axis aval",
    "interpreters.ad.jvp_jaxpr": "jaxpr nonzeros instantiate",
    "interpreters.batching.batch_jaxpr": "axis_data in_batched instantiate",
    "interpreters.batching.bdim_at_front": "x bdim size",
    "interpreters.batching.broadcast": "x sz axis mesh_axis",
    "interpreters.mlir.lower_fun": "fun multiple_results",
    "interpreters.partial_eval.dce_jaxpr": "jaxpr used_outputs instantiate",
    "lax.control_flow.loops._empty_array": "prefix length_spec aval",
    "lax.lax._convert_element_type": "operand new_dtype weak_type",
    "state.discharge.discharge_state": "should_discharge lower",
}


def table():
    """The purpose and the public way of each name, by name below ``jax._src``."""
    rows, module = {}, ""
    for line in TABLE.strip().splitlines():
        if not line.startswith(" "):
            module = line
            continue
        names, text = line.strip().split(": ", 1)
        for name in names.split():
            assert f"{module}.{name}" not in rows
            rows[f"{module}.{name}"] = text.split(" | ")
    return rows


def used():
    """The private names in the sources of the folder."""
    found = set()
    modules = {line for line in TABLE.splitlines() if line and not line.startswith(" ")}
    for path in FOLDER.glob("*.py"):
        own, tree = {}, ast.parse(path.read_text())
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.ImportFrom)
                and not node.level
                and str(node.module).startswith(("jax._src", "jaxlib"))
            ):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}".removeprefix("jax._src.")
                    if whole in modules:
                        own[alias.asname or alias.name] = whole
                    else:
                        found.add(whole)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in own:
                found.add(f"{own[node.value.id]}.{node.attr}")
    return found - {"config.partition"}  # of a string


def lookup(name):
    """The object with a name below ``jax._src``, or of jaxlib; None without one."""
    module, _, attribute = (name if name.startswith("jaxlib") else f"jax._src.{name}").rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        return None


def parameters(name):
    return set(inspect.signature(lookup(name)).parameters)
