"""One thread: the tensors of the tests are tiny, and threads that wait for each other on a busy machine crawl."""

import signal

import torch

torch.set_num_threads(1)
# Tests that are run in the background of a shell would hand an ignored Ctrl-C on to the programs that they stop by it.
signal.signal(signal.SIGINT, signal.default_int_handler)
