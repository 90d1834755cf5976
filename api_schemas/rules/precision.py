"""Rules of the options that only some levels have."""

from collections.abc import Callable

from octet.api_schemas.levels import LEVELS, Level
from octet.api_schemas.rules.rule import Condition, Field, Rule, Table, differs, equals, none_of, one_of


def levels_where(condition: Callable[[Level], bool]) -> tuple[str, ...]:
    """Return the names of the levels whose row satisfies a condition."""
    return tuple(level.name for level in LEVELS.values() if condition(level))


_FP8 = levels_where(lambda level: level.gemm == "fp8")
_OWN_FP8 = levels_where(lambda level: level.has_own_fp8)
_16_BITS = levels_where(lambda level: level.gemm in ("bf16", "fp8"))
_TORCHAO = levels_where(lambda level: level.engine == "torchao")


def _only_at(field: str, must: Condition, levels: tuple[str, ...]) -> Rule:
    """Return the rule of an option that has an effect at some levels. must: it is left out."""
    return Rule(
        f"precision.{field}",
        when=(none_of("precision.level", *levels),),
        must=must,
        got="level {precision.level}",
        allowed=f"{field} at level {', '.join(levels)}",
        change=f"Remove precision.{field}, or choose another precision.level.",
    )


PRECISION = Table(
    Rule(
        "precision.ladder",
        when=(equals("precision.level", "auto"),),
        must=equals("precision.ladder", ()),
        got="precision.level auto",
        allowed="a ladder from a level by its name",
        change="Name the level, or remove precision.ladder.",
    ),
    Rule(
        "precision.ladder",
        when=(),
        must=equals("precision.repeats_a_level", False),
        got="{precision.ladder} after {precision.level}",
        allowed="each level once",
        change="Remove what is there twice from precision.ladder.",
    ),
    Rule(
        "precision.norms",
        when=(differs("precision.norms", "fp32"),),
        must=one_of("precision.level", *_16_BITS),
        got="bf16 at level {precision.level}",
        allowed=f"bf16 where products are in bf16 or FP8: {', '.join(_16_BITS)}",
        change="Set precision.norms to fp32, or choose another precision.level.",
    ),
    _only_at("recipe", equals("precision.recipe", None), _FP8),
    _only_at("torchao", equals("precision.torchao", None), _TORCHAO),
    _only_at("statistics_every", one_of("precision.statistics_every", None, 0), _OWN_FP8),
    # A stored spec has every field, so that only false is an error.
    _only_at("auto_filter", equals("precision.auto_filter", True), _OWN_FP8),
    Rule(
        "precision.demotion",
        when=(equals("precision.resolved_statistics_every", 0),),
        must=equals("precision.demotion", None),
        got="level {precision.level}, statistics_every: 0",
        allowed="demotion only if statistics are sampled",
        change="Set precision.statistics_every, or remove precision.demotion.",
    ),
    Rule(
        "precision.recipe",
        when=(one_of("precision.level", *_TORCHAO),),
        must=Condition("precision.resolved_recipe", "one of", Field("precision.torchao_recipes")),
        got="{precision.changed_recipe}",
        allowed="what torchao has: {precision.changed_torchao_recipes}",
        change="Set precision.recipe to one of these, or precision.level to te.",
    ),
    Rule(
        "precision.torchao",
        when=(
            one_of("precision.level", *_TORCHAO),
            differs("precision.torchao", None),
            equals("precision.torchao.fsdp_float8_all_gather", True),
        ),
        must=equals("precision.torchao_recipe", "tensorwise"),
        got="fsdp_float8_all_gather with {precision.torchao_recipe}",
        allowed="fsdp_float8_all_gather with tensor scales",
        change="Set torchao.fsdp_float8_all_gather to false, or remove precision.recipe.",
    ),
)
