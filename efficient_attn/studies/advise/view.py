"""Views of the records of an advice: for a model, or for attention alone."""

from collections.abc import Sequence

from efficient_attn.measure.record import Record
from efficient_attn.measure.variants import MODEL
from efficient_attn.report.table import Table
from efficient_attn.studies.advise.attention_view import attention_sentences, attention_tables
from efficient_attn.studies.advise.model_view import model_files, model_sentences, model_tables
from efficient_attn.studies.advise.plan import LIMIT
from efficient_attn.studies.advise.plot import advice_plot
from efficient_attn.studies.bench.comparison import error_limit
from efficient_attn.studies.bench.plot import cost_plot
from efficient_attn.studies.view import Environment, Plots


def tables(records: Sequence[Record], environment: Environment) -> list[Table]:
    """The tables of a model, or of attention alone."""
    return (model_tables if _of_model(records, environment) else attention_tables)(records, environment)


def sentences(records: Sequence[Record], environment: Environment) -> list[str]:
    """The conclusion."""
    return (model_sentences if _of_model(records, environment) else attention_sentences)(records, environment)


def plots(records: Sequence[Record], environment: Environment) -> Plots:
    """Times against tokens: of attention alone, and of the model; errors if there is no model."""
    times = [one for one in records if one.case.kind == "time" and one.status == "ok"]
    if not times:
        return {}
    if _of_model(records, environment):
        return {"advise": cost_plot(times)}
    return {"advise": advice_plot(records, error_limit(environment))}


def files(records: Sequence[Record], environment: Environment) -> dict[str, str]:
    """The plan of a model."""
    return model_files(records, environment) if _of_model(records, environment) else {}


def _of_model(records: Sequence[Record], environment: Environment) -> bool:
    return LIMIT in environment or any(record.case.of == MODEL for record in records)
