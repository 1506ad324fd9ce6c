//! `top`: the running managers, refreshed every second.

use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::Duration;

use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span, Text};
use ratatui::widgets::{Block, Paragraph};

use super::show::describe;
use crate::heat::HeatMap;
use crate::snapshot::Snapshot;

pub(super) fn run() -> anyhow::Result<ExitCode> {
    if !std::io::stdout().is_terminal() {
        // No terminal to draw on: print the state once, as text.
        return super::show::status(false);
    }
    let mut terminal = ratatui::try_init()?;
    let result = watch(&mut terminal);
    ratatui::restore();
    result.map(|()| ExitCode::SUCCESS)
}

fn watch(terminal: &mut ratatui::DefaultTerminal) -> anyhow::Result<()> {
    loop {
        let all = Snapshot::all()?;
        terminal.draw(|frame| draw(frame, &all))?;
        if event::poll(Duration::from_secs(1))?
            && let Event::Key(key) = event::read()?
            && key.kind == KeyEventKind::Press
            && matches!(key.code, KeyCode::Char('q' | 'c') | KeyCode::Esc)
        {
            return Ok(());
        }
    }
}

fn draw(frame: &mut ratatui::Frame<'_>, all: &[Snapshot]) {
    let text: String = match all {
        [] => super::show::NOBODY.to_owned(),
        some => some.iter().map(describe).collect(),
    };
    let lines = text.lines().count() as u16 + 2;
    let [upper, lower] =
        Layout::vertical([Constraint::Length(lines), Constraint::Min(0)]).areas(frame.area());
    frame.render_widget(
        Paragraph::new(text).block(Block::bordered().title("varve vm (q leaves)")),
        upper,
    );
    if let Some(map) = all.iter().flat_map(|s| &s.heat).max_by_key(|m| m.rows.len()) {
        let title = format!("heat of {} ({}), newest right", map.name, map.pid);
        frame.render_widget(
            Paragraph::new(picture(map)).block(Block::bordered().title(title)),
            lower,
        );
    }
}

fn picture(map: &HeatMap) -> Text<'static> {
    let row = |r: usize, (start, end): (u64, u64)| {
        let mut spans = vec![Span::raw(format!("{start:>13x} {:>5} MiB ", (end - start) >> 20))];
        spans.extend(map.columns.iter().map(|c| match c.get(r).copied().flatten() {
            None => Span::styled("?", Style::new().fg(Color::DarkGray)),
            Some(heat) => Span::styled(" ", Style::new().bg(Color::Rgb(40 + heat * 2, 60, 160 - heat))),
        }));
        Line::from(spans)
    };
    map.rows
        .iter()
        .enumerate()
        .map(|(r, range)| row(r, *range))
        .collect::<Vec<_>>()
        .into()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use ratatui::{Terminal, backend::TestBackend};

    #[test]
    fn top_draws_every_process_and_its_heat() {
        let mut map = HeatMap {
            pid: 9,
            name: "redis".to_owned(),
            ..HeatMap::default()
        };
        map.push(&[(0, 1 << 21, Some(1.0)), (1 << 21, 1 << 22, None)]);
        let process = crate::snapshot::ProcessStatus {
            pid: 9,
            name: "redis".to_owned(),
            ..Default::default()
        };
        let all = [Snapshot {
            processes: vec![process],
            heat: vec![map],
            ..Snapshot::default()
        }];
        let mut terminal = Terminal::new(TestBackend::new(120, 30)).unwrap();
        terminal.draw(|f| draw(f, &all)).unwrap();
        let screen: String = terminal
            .backend()
            .buffer()
            .content()
            .iter()
            .map(|c| c.symbol())
            .collect();
        assert!(
            screen.contains("9 redis") && screen.contains("heat of redis (9)") && screen.contains("2 MiB ?")
        );
    }
}
