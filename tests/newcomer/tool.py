def divisors(number: int) -> str:
    """List the divisors of a number."""
    return " ".join(str(n) for n in range(1, number + 1) if number % n == 0)
