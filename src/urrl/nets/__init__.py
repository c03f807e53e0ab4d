from urrl.nets.network import NETS, Network, Out, build_network

__all__ = ["NETS", "Network", "Out", "build_network"]
