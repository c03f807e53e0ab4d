"""One thread: the tensors of the tests are tiny, and threads that wait for each other on a busy machine crawl."""

import torch

torch.set_num_threads(1)
