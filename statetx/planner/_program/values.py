"""The values of a region that a plan may save, with the ways to hold one between the passes.

Values are results of equations, and values inside the rule of a ``custom_vjp``. The residuals of such a rule (the sums
of a flash attention, say) are no results of the function: without them a plan could only run the whole function again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ... import _jax
from ..._cached import cached_property
from ..._equations.dataflow import needed_equations
from ..._equations.differentiate import backward_pass, forward_pass
from ..._equations.inline import inline
from ..._equations.primitives import JIT, flops
from ..._equations.structure import Body
from ..._errors import PolicyError
from ..._jax import Atom, Aval, Eqn, Jaxpr, Literal, Var
from ..._lift.context import device_bytes
from ..._records import one_of
from ..._remat import mark
from ..._remat.mark import RULE, Label
from ..._remat.stored import NAMES, StoredType, as_stored_type
from ..._remat.survey import Site, Survey, SurveyedRule
from ..._tree import num_bytes

Address = tuple[int, ...]
"""A value of a region: (equation, output); in the rule of a ``custom_vjp`` (equation, `RULE`, equation of the rule,
output).
"""


INPUT = -1
"""In place of the equation: (`INPUT`, index) is an input of the region, which it holds in fewer bits."""


class Values(NamedTuple):
    """The values that may be saved, by address.

    Attributes:
        results: of the results of a ``custom_vjp``, each value of the rule that is one, by the address of the result.
    """

    sites: dict[Address, Site]
    results: dict[Address, Site]


def values_of(jaxpr: Jaxpr) -> Values:
    """The values of a region. Those in inner jaxprs, such as branches, cannot be saved."""
    survey = Survey(jaxpr)
    sites = {site.address: site for site in survey.results if len(site.address) == 2}
    results: dict[Address, Site] = {}
    for (i, *inner), rule in survey.rules.items():
        if not inner and rule.eqn.primitive.name == "custom_vjp_call":
            _add_rule(i, rule, sites, results)
    return Values(sites, results)


def _add_rule(i: int, rule: SurveyedRule, sites: dict[Address, Site], results: dict[Address, Site]) -> None:
    rule_sites = [site for site in rule.survey.sites if len(site.address) == 4]  # (call, 0, equation, output)
    if not rule_sites:
        return
    jaxpr = _jax.rule_of(rule.eqn)
    results_of_rule = enumerate(jaxpr.outvars[o] for o in _jax.results_of_rule(rule.eqn, jaxpr))
    number = {v: n for n, v in results_of_rule if isinstance(v, _jax.Var)}
    for site in rule_sites:
        *_, equation, output = site.address
        variable = jaxpr.eqns[equation].outvars[output]
        if variable in number:
            address = i, number[variable]
            results[address] = site._replace(address=address)
        else:
            address = i, RULE, equation, output
            sites[address] = site._replace(address=address)


@dataclasses.dataclass(frozen=True)
class _OfRule:
    """The labels of values that a rule computes, as `_remat.mark` takes them.

    Attributes:
        labels: by equation and output in the rule's jaxpr.
    """

    labels: tuple[tuple[Address, Label], ...]

    def __call__(self, jaxpr: Jaxpr) -> dict[Address, Label]:
        # For other differentiated inputs a rule may have other equations.
        return {(i, n): what for (i, n), what in self.labels if i < len(jaxpr.eqns) and n < len(jaxpr.eqns[i].outvars)}


def labels_of(labels: Mapping[Address, Label]) -> dict[Address, Label]:
    """Labels by address, with the values of one rule together."""
    by_address: dict[Address, Label] = {a: label for a, label in labels.items() if len(a) == 2}
    of_rules: dict[int, list[tuple[Address, Label]]] = {}
    for address, label in sorted(labels.items(), key=lambda item: item[0]):
        if len(address) > 2:
            of_rules.setdefault(address[0], []).append((address[2:], label))
    return by_address | {(i, RULE): _OfRule(tuple(inner)) for i, inner in of_rules.items()}


# -- ways to hold them ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to hold a value: in memory, and the base of the others.

    Attributes:
        name: in a stored plan, and in printed texts.
        is_read_early: whether all such values are in memory when the backward pass begins; else one at a time counts.
    """

    name: str
    is_read_early = False

    def num_bytes(self, aval: Aval) -> int:
        """Bytes on one device between the passes."""
        return device_bytes(aval)

    def read_bytes(self, aval: Aval) -> int:
        """Bytes that the backward pass needs beyond these to read the value."""
        return 0

    def cost(self, aval: Aval) -> int:
        """Operations to hold the value so, and to read it."""
        return 0

    def label(self, *, is_ordered: bool) -> mark.Label:
        """The mark in the program. `is_ordered`: what follows the forward pass waits for the conversion."""
        return mark.SAVE

    def stored_type(self, aval: Aval) -> Aval | jax.ShapeDtypeStruct:
        """The type of the array that holds a value."""
        return aval

    def decode(self, stored: jax.Array, aval: Aval) -> jax.Array:
        """The value from this array."""
        return stored


class _OnHost(Way):
    is_read_early = True  # XLA may fetch all of them early, which errs high

    def num_bytes(self, aval: Aval) -> int:
        return 0

    def read_bytes(self, aval: Aval) -> int:
        return device_bytes(aval)

    def label(self, *, is_ordered: bool) -> mark.Label:
        return mark.offload("device", _jax.HOST_MEMORY)


class InFormat(Way):
    """Way to hold a value in fewer bits, in the stored type of this name."""

    @property
    def format(self) -> StoredType:
        return StoredType(self.name)

    def num_bytes(self, aval: Aval) -> int:
        return -(-device_bytes(aval) * self.format.nbytes(aval) // max(num_bytes(aval), 1))

    def read_bytes(self, aval: Aval) -> int:
        return device_bytes(aval)

    def cost(self, aval: Aval) -> int:
        array = _jax.shaped(aval)
        return sum(map(flops, _conversion(array.shape, array.dtype, self.format).eqns))

    def label(self, *, is_ordered: bool) -> mark.Label:
        return mark.StoredLabel(self.format, mark.SAVE, is_ordered)

    def stored_type(self, aval: Aval) -> Aval | jax.ShapeDtypeStruct:
        return self.format.stored_type(aval)

    def decode(self, stored: jax.Array, aval: Aval) -> jax.Array:
        return self.format.decode(stored, aval)


@functools.lru_cache(1024)
def _conversion(shape: tuple[int, ...], dtype: jax.typing.DTypeLike, format: StoredType) -> Jaxpr:
    aval = jax.ShapeDtypeStruct(shape, dtype)
    run: Callable[[jax.Array], list[jax.Array]] = lambda x: [format.decode(format.encode(x), aval)]
    jaxpr, _ = _jax.stage(run, [_jax.abstract(aval)], traced_for="statetx.plan", name="conversion")
    return inline(jaxpr, calls=JIT, deep=False)


KEEP, ON_HOST = Way("keep"), _OnHost("offload")

WAY = one_of(KEEP.name, ON_HOST.name, *NAMES)
"""Check the name of a way in a record."""

FORMAT = one_of(*NAMES)
"""Check the name of a stored type in a record."""


def way_of(name: str) -> Way:
    """The way with a name."""
    return {KEEP.name: KEEP, ON_HOST.name: ON_HOST}.get(name) or InFormat(name)


# -- stored types ---------------------------------------------------------------------------------------------------

Formats = tuple[StoredType, ...]
"""The stored types that a plan may use."""


def read_formats(stored_as: str | Sequence[str]) -> Formats:
    """Convert an argument of users."""
    names = (stored_as,) if isinstance(stored_as, (str, StoredType)) else stored_as
    if not isinstance(names, Sequence):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise PolicyError(f"stored_as must be the name of a format or a sequence of names, got {stored_as!r}.")
    return tuple(dict.fromkeys(as_stored_type(name, "stored_as: each format") for name in names))


def smallest(aval: Aval, formats: Formats, *, is_bits: bool) -> InFormat | None:
    """The stored type of the fewest bytes for a value; None if none is smaller than the value.

    Args:
        is_bits: whether the value is proved to be 0 or 1. Others are not stored as bits.
    """
    fit = [f for f in formats if (is_bits or not f.is_exact) and hasattr(aval, "dtype") and f.shrinks(aval)]
    format = min(fit, key=lambda f: f.nbytes(aval), default=None)
    return None if format is None else InFormat(format.name)


def smallest_of_variables(jaxpr: Jaxpr, formats: Formats) -> dict[Var, InFormat]:
    """The variables of a program that can be stored in fewer bits, each with the type of the fewest bytes."""
    formats_by_variable: dict[Var, InFormat] = {}
    for site in Survey(jaxpr).results if formats else ():
        way = smallest(site.value.type, formats, is_bits=site.value.is_bits) if len(site.address) == 2 else None
        if way is not None:
            formats_by_variable[jaxpr.eqns[site.address[0]].outvars[site.address[1]]] = way
    return formats_by_variable


# -- the derivative of a region, whose values are residuals ---------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class ForwardPass:
    """A forward pass: ``(constants, inputs) -> (differentiated outputs, residuals)``.

    Attributes:
        num_outs: number of differentiated outputs.
        num_constants: arrays that rules of the derivative close over; the region's own inputs follow.
    """

    jaxpr: Jaxpr
    num_outs: int
    num_constants: int = 0

    @property
    def inputs(self) -> list[Var]:
        """The variables of the region's inputs, in order."""
        return list(self.jaxpr.invars[self.num_constants :])

    @cached_property
    def residuals(self) -> set[Var]:
        """The variables that the backward pass reads, inputs among them."""
        return {v for v in self.jaxpr.outvars[self.num_outs :] if isinstance(v, Var)}

    @cached_property
    def computed_residuals(self) -> list[Var]:
        """The distinct residuals that are not inputs, in order."""
        inputs = set(self.jaxpr.invars)
        atoms = self.jaxpr.outvars[self.num_outs :]
        return list({v: None for v in atoms if not isinstance(v, Literal) and v not in inputs})

    @cached_property
    def producer(self) -> dict[Var, Eqn]:
        """The equation that computes each variable."""
        return {v: eqn for eqn in self.jaxpr.eqns for v in eqn.outvars}

    def needed(self, available: Container[Var] = ()) -> list[Eqn]:
        """The equations that the residuals depend on, in order, where some variables are available."""
        return needed_equations(self.jaxpr.eqns, self.computed_residuals, available)


@dataclasses.dataclass(frozen=True)
class BackwardPass:
    """A backward pass.

    Attributes:
        residuals, cotangents: its inputs.
        forward_residuals: for each of `residuals`, the variable of the forward pass.
    """

    jaxpr: Jaxpr
    residuals: list[Var]
    forward_residuals: list[Var]
    cotangents: list[Var]


def derivative_of(
    jaxpr: Jaxpr, diff_indices: Sequence[int], out_indices: Sequence[int]
) -> tuple[ForwardPass, BackwardPass]:
    """Stage the derivative of some outputs of a region with respect to some inputs."""
    with _jax.rules_kept(_jax.equations_in(jaxpr)):

        def run(*inputs: jax.Array) -> list[jax.Array]:
            outs = _jax.evaluate(jaxpr, (), inputs)
            return [jnp.asarray(outs[i]) for i in out_indices]  # pyright: ignore[reportUnknownMemberType]

        in_avals = [v.aval for v in jaxpr.invars]
        forward = forward_pass(run, in_avals, diff_indices, traced_for="statetx.plan", name="forward")
        forward_jaxpr = inline(forward.body.jaxpr, calls=JIT, deep=False)
        num_outs = len(out_indices)
        residuals = forward_jaxpr.outvars[num_outs:]

        avals = [v.aval for v in residuals], [v.aval for v in forward_jaxpr.outvars[:num_outs]]
        body = Body.close(*backward_pass(forward.pullback, *avals, traced_for="statetx.plan", name="backward"))
        backward_jaxpr = inline(_bind_literals(body, residuals), calls=JIT, deep=False)

        # Literal residuals are inlined, so the inputs are the other residuals in order, then the cotangents.
        variables = [v for v in residuals if isinstance(v, Var)]
        inputs, cotangents = backward_jaxpr.invars[: len(variables)], backward_jaxpr.invars[len(variables) :]
        passes = ForwardPass(forward_jaxpr, num_outs, forward.body.num_operands)
        return passes, BackwardPass(backward_jaxpr, inputs, variables, cotangents)


def without_identities(
    forward: ForwardPass, backward: BackwardPass, is_identity: Callable[[Eqn], bool]
) -> tuple[ForwardPass, BackwardPass]:
    """Return the derivative without the equations that are identities."""
    plain, read = _without(forward.jaxpr, is_identity)
    atoms = {v: read(atom) for v, atom in zip(backward.residuals, backward.forward_residuals, strict=True)}
    literals = {v: atom for v, atom in atoms.items() if isinstance(atom, Literal)}
    backward = BackwardPass(
        _jax.with_atoms(_without(backward.jaxpr, is_identity)[0], literals),
        residuals=[v for v in atoms if v not in literals],
        forward_residuals=[atom for atom in atoms.values() if isinstance(atom, Var)],
        cotangents=backward.cotangents,
    )
    return dataclasses.replace(forward, jaxpr=plain), backward


def _without(jaxpr: Jaxpr, is_identity: Callable[[Eqn], bool]) -> tuple[Jaxpr, Callable[[Atom], Atom]]:
    eqns, read = without(jaxpr.eqns, is_identity)
    return _jax.rebuild(jaxpr, invars=jaxpr.invars, outvars=list(map(read, jaxpr.outvars)), eqns=eqns), read


def without(eqns: Sequence[Eqn], is_identity: Callable[[Eqn], bool]) -> tuple[list[Eqn], Callable[[Atom], Atom]]:
    """Equations without identities, and a function from an atom to its replacement."""
    operands: dict[Var, Atom] = {}
    read: Callable[[Atom], Atom] = lambda atom: atom if isinstance(atom, Literal) else operands.get(atom, atom)
    remaining: list[Eqn] = []
    for eqn in eqns:
        if any(read(a) is not a for a in eqn.invars):
            eqn = eqn.replace(invars=list(map(read, eqn.invars)))
        if is_identity(eqn):
            operands[eqn.outvars[0]] = eqn.invars[0]
        else:
            remaining.append(eqn)
    return remaining, read


def _bind_literals(backward: Body, residuals: Sequence[Atom]) -> Jaxpr:
    """The backward pass without dead code, with its closed-over values and literal residuals inlined."""
    atoms: list[Atom] = [Literal(x, v.aval) for x, v in zip(backward.operands, backward.jaxpr.invars, strict=False)]
    atoms += residuals
    literals = {v: a for v, a in zip(backward.jaxpr.invars, atoms, strict=False) if isinstance(a, Literal)}
    return _jax.without_dead_code(_jax.with_atoms(backward.jaxpr, literals))
