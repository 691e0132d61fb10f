"""Machines that steps have been measured on, one file each: data sheets, fitted coefficients, errors."""

from mycel.planning.machines.machine import Fit, Machine, known_machines, load_machine

__all__ = ["Fit", "Machine", "known_machines", "load_machine"]
