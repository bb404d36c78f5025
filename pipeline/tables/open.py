"""Tables that a job names, of any format. The libraries are imported here and nowhere before."""

from __future__ import annotations

from pipeline.config.input import InputConfig
from pipeline.config.job import OutputConfig, StorageConfig
from pipeline.tables.table import InputTable, OutputTable


def input_table(section: InputConfig, storage: StorageConfig) -> InputTable:
    """The table of `input`. UserError if it does not exist or cannot be read."""
    assert section.is_table
    if section.format == "iceberg":
        from pipeline.tables.iceberg_input import IcebergInput

        return IcebergInput(section.path[0], storage)
    from pipeline.tables.delta_input import DeltaInput

    return DeltaInput(section.path[0], storage)


def output_table(section: OutputConfig, storage: StorageConfig) -> OutputTable:
    """The table of `output`, which need not exist. UserError if its catalog cannot be opened."""
    assert section.is_table
    if section.format == "iceberg":
        from pipeline.tables.iceberg_output import IcebergOutput

        return IcebergOutput(str(section.table), storage)
    from pipeline.tables.delta_output import DeltaOutput

    return DeltaOutput(table_name(section), storage)


def table_name(section: OutputConfig) -> str:
    """The output table's name, or of a Delta table its folder."""
    return section.table or section.path
