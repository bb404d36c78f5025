"""`skipdecode try`: answer a few rows in this process and print them."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli.command import Changes, JobFile, Verbose, command


def try_rows(
    job: JobFile,
    changes: Changes = None,
    rows: Annotated[int, typer.Option(min=1, help="How many rows, from the first on.")] = 5,
    verbose: Verbose = False,
) -> None:
    """Answer a few rows in this process and print prompts and answers. Writes nothing and starts no Ray."""
    lower = "lower actors.cache_bytes or choose model.dtype: bfloat16"
    with command(verbose, out_of_memory=lower) as advice:
        from pipeline.config.job import JobConfig

        config = advice.load(JobConfig, job, changes)
        from rich.console import Console

        from pipeline.generate.answer_checks import LEAST_TRIED, texts_of, warnings_of
        from pipeline.messages import counted, parsed_control_tokens
        from pipeline.try_rows import answer_first_rows

        console = Console(soft_wrap=True)
        tried = answer_first_rows(config, rows, lambda line: console.print(line, markup=False, highlight=False))
        for row in tried:
            lines = [f"\n[{row.id}]", f"  prompt: {row.prompt}" if row.prompt else ""]
            for answer in row.answers:
                if answer.error is not None:
                    lines.append(f"  error: {answer.error}")
                    continue
                name = f"answer {answer.sample_index}" if len(row.answers) > 1 else "answer"
                depth = "" if answer.mean_depth is None else f", {answer.mean_depth:.2f} layers on average"
                share = answer.choice_probability
                sure = "" if share is None else f", {share:.2f} of the choices' probability"
                calls = [f"  call: {call['name']} {call['arguments']}" for call in answer.tool_calls or ()]
                lines += [
                    f"  {name}: {answer.generated_text}",
                    *calls,
                    f"    ({answer.finish_reason}, {counted(answer.generated_tokens, 'token')}{depth}{sure})",
                ]
            console.print("\n".join(filter(None, lines)), markup=False, highlight=False)
        if parsed := sum(row.control_tokens for row in tried):
            console.print(parsed_control_tokens(parsed), highlight=False)
        answers = [answer for row in tried for answer in row.answers]
        cut_off = sum(answer.finish_reason == "length" for answer in answers)
        for line in warnings_of(texts_of(answers), LEAST_TRIED, cut_off):
            console.print(f"warning: {line}", markup=False, highlight=False)
