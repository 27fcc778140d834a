// Marks that ECharts does not have: a range with quartiles and median, as one custom series.

/**
 * A custom series of ranges. `items` are { at, five: [low, first, median, third, high], color, name }, `at` is the index
 * on the category axis; `horizontal` puts the categories on the y axis. The whisker goes from low to high, the box
 * from first to third quartile, the dot is the median.
 */
export function rangeSeries(items, { horizontal = false, surface, fontPx, name = "", xAxisIndex = 0, yAxisIndex = 0 }) {
  return {
    type: "custom",
    name,
    xAxisIndex,
    yAxisIndex,
    clip: true,
    encode: horizontal ? { x: [1, 2, 3, 4, 5], y: 0 } : { x: 0, y: [1, 2, 3, 4, 5] },
    data: items.map((item) => ({ value: [item.at, ...item.five], name: item.name })),
    renderItem: (params, api) => {
      const item = items[params.dataIndexInside];
      const place = (value) => (horizontal ? api.coord([value, api.value(0)]) : api.coord([api.value(0), value]));
      const [low, first, median, third, high] = [1, 2, 3, 4, 5].map((index) => place(api.value(index)));
      const half = Math.min(fontPx * 0.75, (horizontal ? api.size([0, 1])[1] : api.size([1, 0])[0]) * 0.28);
      const box = horizontal
        ? { x: Math.min(first[0], third[0]), y: first[1] - half, width: Math.abs(third[0] - first[0]), height: 2 * half, r: 2 }
        : { x: first[0] - half, y: Math.min(first[1], third[1]), width: 2 * half, height: Math.abs(third[1] - first[1]), r: 2 };
      return {
        type: "group",
        children: [
          { type: "line", shape: { x1: low[0], y1: low[1], x2: high[0], y2: high[1] }, style: { stroke: item.color, lineWidth: 1.5 } },
          { type: "rect", shape: box, style: { fill: item.color, opacity: 0.35 } },
          { type: "circle", shape: { cx: median[0], cy: median[1], r: Math.max(3, half * 0.5) }, style: { fill: item.color, stroke: surface, lineWidth: 1.5 } },
        ],
      };
    },
  };
}
