"""What every room shares: errors, tables, percentiles, the clock. One way to do each of these things."""
