"""What the benchmark of kills is made of: the parts that are killed, a disk that fills up, a clock that is set."""
