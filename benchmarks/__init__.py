"""Where speed is claimed: one question a file, side by side with the peers that are at hand.

    python -m benchmarks                        everything, beside the peers of scripts/peers
    python -m benchmarks extend cycle --items M two questions, with items of 3 KB
    python -m benchmarks --help
    python -m benchmarks.instructions           what needs no quiet machine

Trust the ratios of one table, not its microseconds: the libraries are measured in turn within every
round, so that what disturbs one disturbs the other.
"""
