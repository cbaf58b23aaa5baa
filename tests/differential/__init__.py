"""Training programs drawn at random, run with `distribute` on real ranks and without it in one
process."""
