from urrl.nets.network import NETS, Members, Network, Out, build_network

__all__ = ["NETS", "Members", "Network", "Out", "build_network"]
