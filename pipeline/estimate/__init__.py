"""What a job will take, before it runs: `skipdecode plan`. Sample, measure where actors run, simulate all batches."""
