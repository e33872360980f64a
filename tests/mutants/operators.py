"""Operators of mutation: a choice of cosmic-ray's, and faults of omission that cosmic-ray lacks."""

import re
from collections.abc import Iterable, Iterator
from typing import ClassVar

import parso
from cosmic_ray.operators import (
    binary_operator_replacement,
    boolean_replacer,
    break_continue,
    comparison_operator_replacement,
    exception_replacer,
    number_replacer,
    unary_operator_replacement,
    zero_iteration_for_loop,
)
from cosmic_ray.operators.operator import Operator
from parso.tree import NodeOrLeaf

Position = tuple[tuple[int, int], tuple[int, int]]


class ReplaceException(exception_replacer.ExceptionReplacer):
    """Replace an exception of a handler. Cosmic-ray's own operator fails on dotted names."""

    @staticmethod
    def _name_nodes(node: NodeOrLeaf) -> list[NodeOrLeaf]:
        named = node.children[1]
        if named.type == "atom":  # in parentheses
            named = named.children[1]
        names = named.children[::2] if named.type == "testlist_comp" else [named]
        return [name.get_last_leaf() for name in names]


class _Operator(Operator):
    """An operator without examples in its documentation."""

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


class DropStatement(_Operator):
    """Replace a call, or an assignment to an attribute or an item, by ``pass``."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        if node.type == "simple_stmt" and self._has_an_effect(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    @staticmethod
    def _has_an_effect(statement: NodeOrLeaf) -> bool:
        if statement.type in ("atom_expr", "power"):
            return statement.children[-1].get_code().startswith("(")
        if statement.type == "expr_stmt":
            target, operator = statement.children[:2]
            return operator.type == "operator" and (
                operator.value != "=" or target.type in ("atom_expr", "power")
            )
        return False

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        statement = node.children[0]
        node.children[0] = parso.parse(statement.get_first_leaf().prefix + "pass")
        return node


class DropOperand(_Operator):
    """Drop one operand of ``and`` or ``or``."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        if node.type in ("and_test", "or_test"):
            for operand in node.children[::2]:
                yield operand.start_pos, operand.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        first = 2 * index - 1 if index else 0
        prefix = node.get_first_leaf().prefix
        del node.children[first : first + 2]
        node.get_first_leaf().prefix = prefix
        return node


class ConstantCondition(_Operator):
    """Replace a condition by True or by False; leave the loops with ``while`` alone."""

    _PLACES: ClassVar = {"ternary": 2, "test": 2, "comp_if": 1}

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        for place in self._conditions(node):
            for _ in ("True", "False"):
                yield node.children[place].start_pos, node.children[place].end_pos

    @classmethod
    def _conditions(cls, node: NodeOrLeaf) -> list[int]:
        if node.type == "if_stmt":
            return [
                place + 1
                for place, child in enumerate(node.children)
                if child.type == "keyword" and child.value in ("if", "elif")
            ]
        place = cls._PLACES.get(node.type)
        return [] if place is None else [place]

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        place = self._conditions(node)[index // 2]
        node.children[place] = parso.parse(f" {index % 2 == 0}")
        return node


class DropCall(_Operator):
    """Replace ``min(a, b)`` and ``max(a, b)`` by one argument, and ``reversed(x)`` by ``x``."""

    _ONE = ("reversed", "sorted", "abs", "isfinite", "ceil")
    _TWO = ("min", "max")

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        for _ in self._arguments(node):
            yield node.start_pos, node.end_pos

    @classmethod
    def _arguments(cls, node: NodeOrLeaf) -> list[str]:
        if node.type not in ("atom_expr", "power") or len(node.children) != 2:
            return []
        name, trailer = node.children
        code = trailer.get_code()
        if name.type != "name" or not code.startswith("("):
            return []
        content = trailer.children[1]
        if name.value in cls._ONE and content.type not in ("arglist", "argument", "operator"):
            return [content.get_code()]
        if name.value in cls._TWO and content.type == "arglist":
            arguments = content.children[::2]
            if all(argument.type != "argument" for argument in arguments):
                return [argument.get_code() for argument in arguments]
        return []

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        argument = self._arguments(node)[index].strip()
        return parso.parse(f"{node.get_first_leaf().prefix}({argument})")


class SwapName(_Operator):
    """Replace a reduction by another, for example ``min`` by ``max`` and ``any`` by ``all``."""

    _PAIRS = (
        ("min", "max"), ("any", "all"), ("minimum", "maximum"), ("floor", "ceil"),
        ("startswith", "endswith"), ("lstrip", "rstrip"), ("ones", "zeros"),
    )  # fmt: skip
    _OTHER: ClassVar = {name: other for pair in _PAIRS for name, other in (pair, pair[::-1])} | {
        "mean": "min"
    }

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        if node.type == "name" and node.value in self._OTHER and self._is_called(node):
            yield node.start_pos, node.end_pos

    @staticmethod
    def _is_called(node: NodeOrLeaf) -> bool:
        following = node.get_next_leaf()
        return following is not None and following.get_code().startswith("(")

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        node.value = self._OTHER[node.value]
        return node


class ReplaceWord(_Operator):
    """Change a string of one word: a key, a name on the wire, a kind of error."""

    _WORD = re.compile(r"""^[a-z]?(["'])[\w./:-]+\1$""")

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[Position]:
        if node.type == "string" and self._WORD.match(node.value):
            yield node.start_pos, node.end_pos

    def mutate(self, node: NodeOrLeaf, index: int) -> NodeOrLeaf:
        node.value = f"{node.value[:-1]}x{node.value[-1]}"
        return node


def _named(module: object, *names: str) -> Iterator[Operator]:
    for name in names:
        yield getattr(module, name)()


def _comparisons() -> Iterable[str]:
    pairs = "Lt_LtE LtE_Lt Gt_GtE GtE_Gt Lt_Gt Gt_Lt Eq_NotEq NotEq_Eq Is_IsNot IsNot_Is"
    return (f"ReplaceComparisonOperator_{pair}" for pair in pairs.split())


def _arithmetic() -> Iterable[str]:
    pairs = "Add_Sub Sub_Add Mul_FloorDiv Div_Mul FloorDiv_Mul Mod_Mul BitAnd_BitOr LShift_RShift"
    return (f"ReplaceBinaryOperator_{pair}" for pair in pairs.split())


_UNARY = "ReplaceUnaryOperator_Delete_Not ReplaceUnaryOperator_Delete_USub"
_BOOLEAN = "ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd AddNot"

OPERATORS: tuple[Operator, ...] = (
    *_named(comparison_operator_replacement, *_comparisons()),
    *_named(binary_operator_replacement, *_arithmetic()),
    *_named(unary_operator_replacement, *_UNARY.split()),
    *_named(boolean_replacer, *_BOOLEAN.split()),
    *_named(break_continue, "ReplaceBreakWithContinue", "ReplaceContinueWithBreak"),
    ReplaceException(),
    number_replacer.NumberReplacer(),
    zero_iteration_for_loop.ZeroIterationForLoop(),
    *(kind() for kind in _Operator.__subclasses__()),
)
